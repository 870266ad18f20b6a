"""The metadata log: the controller's writer, and each broker's copy."""
