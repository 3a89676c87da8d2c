"""Optimizer state in the host's memory."""

from .base import host as host
from .delayed import delayed as delayed
