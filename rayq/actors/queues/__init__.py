"""Queue leaders, which run beside the leaders of data partitions, and the keepers of their
state."""
