"""The metadata log: the controller's hold on it, and each broker's copy."""
