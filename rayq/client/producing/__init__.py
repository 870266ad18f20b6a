"""Producers: from `send` to the leader's answer."""
