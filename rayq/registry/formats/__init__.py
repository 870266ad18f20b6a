"""Formats of schemas: reading a text, and writing it in canonical form.

Each module has one format. Its functions take a `ResolvedSchema`, and raise InvalidSchemaError for
what the format does not allow.
"""
