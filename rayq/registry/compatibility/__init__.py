"""Compatibility of two schemas of one format: whether a reader with one of them reads all that a
writer with the other one writes.

Each module has one format, with one function: (reader, writer) -> what does not fit, and where.
"""
