"""Queue leaders, which run beside the leaders of data partitions, and queue state coordinators."""
