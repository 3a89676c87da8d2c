"""The figures that the commands draw."""
