"""Queues, as clients use them."""
