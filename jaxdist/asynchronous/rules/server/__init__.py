"""Rules with a parameter server."""
