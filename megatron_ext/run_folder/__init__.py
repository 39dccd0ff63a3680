"""Files of a run folder: their names, its lock, heartbeats and launch events."""
