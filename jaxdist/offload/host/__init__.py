"""Optimizer state in the host's memory."""
