"""Transactions: their coordinator, and the connections of servers to leaders and coordinators."""
