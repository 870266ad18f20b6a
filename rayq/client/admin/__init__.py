"""Administration of a cluster: descriptions and changes."""
