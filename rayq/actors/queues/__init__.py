"""The leaders of queues beside those of data partitions, and the keepers of what they decide."""
