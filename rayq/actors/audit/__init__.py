"""The audit: what servers note, and the coordinator that writes it."""
