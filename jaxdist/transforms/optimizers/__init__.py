"""Optimizers that communicate inside: each takes the place of `all_reduce` and of the optimizer after it."""

from .demo import demo as demo
from .dion import dion as dion
