"""Capacity: the brokers, partitions and disks that a load needs, and what a cluster was measured to
cost and carry."""
