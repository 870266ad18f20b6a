"""Clients of queues."""
