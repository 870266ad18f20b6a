"""The object server: the one process of each broker that talks to the object store."""
