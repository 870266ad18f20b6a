"""Remote storage of a partition, which its leader manages: uploads, reads, retention."""
