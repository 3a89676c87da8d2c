"""Parameters on disk, one layer in memory at a time."""
