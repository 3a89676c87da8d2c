"""Named methods as compositions of a few lines: read them, and write your own."""

from . import bagua as bagua
from .data_parallel import compressed_adam as compressed_adam
from .data_parallel import ddp as ddp
