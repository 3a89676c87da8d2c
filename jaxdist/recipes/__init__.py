"""Named methods as compositions of a few lines: read them, and write your own."""

from . import bagua as bagua
from .ddp import ddp as ddp
