"""Replicas of partitions: the process, the roles, the log."""
