"""A broker: one for each data directory."""
