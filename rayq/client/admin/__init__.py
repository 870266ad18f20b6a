"""Questions about a cluster, and changes to it."""
