"""The schema registry: formats of schemas, and which versions of a schema fit each other.

Only this package imports the libraries of schemas, which the extra `registry` installs.
"""
