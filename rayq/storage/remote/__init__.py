"""The formats of rayq's objects in an object store: data objects, manifests, lists. Bytes in and
out, no client.

A partition's objects are below `<cluster id>/<topic id>/<partition>/`. They are immutable; what
counts of them is what the committed remote pointer's manifest names.
"""
