"""From the leaders' logs to `poll`, alone or in a group."""
