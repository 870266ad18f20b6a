"""From `send` to the leader's answer."""
