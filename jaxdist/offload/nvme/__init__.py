"""Optimizer state on disk."""
