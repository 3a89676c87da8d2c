"""Named methods as compositions of a few lines: read them, and write your own."""

from . import bagua as bagua
from .compressed_adam import compressed_adam as compressed_adam
from .ddp import ddp as ddp
