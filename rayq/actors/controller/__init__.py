"""The controller: decides, and commits what it decides to the metadata log."""
