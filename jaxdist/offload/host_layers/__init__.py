"""Parameters in host memory, three layers on the device at a time."""
