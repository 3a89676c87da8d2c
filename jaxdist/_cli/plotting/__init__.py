"""The figures that commands draw."""
