"""Consumers, alone or in a group: from the leaders' logs to `poll`."""
