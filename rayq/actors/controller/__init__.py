"""The controller: makes every decision on the cluster, and commits it to the metadata log."""
