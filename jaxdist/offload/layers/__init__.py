"""Stacks of layers that are computed one at a time: their programs, and the order of a step."""
