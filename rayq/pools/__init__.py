"""Consumer pools: as many consumers of a group as the lag requires."""
