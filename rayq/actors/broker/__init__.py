"""The broker: one process for each data directory."""
