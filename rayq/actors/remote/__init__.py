"""What the replica that leads does about records in the object store."""
