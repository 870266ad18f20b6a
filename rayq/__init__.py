"""rayq: a distributed, durable log on Ray."""
