"""Transactions: their coordinator, and the way of servers to leaders and coordinators."""
