"""ZeRO: state cut over the workers."""

from .base import zero_redundancy as zero_redundancy
