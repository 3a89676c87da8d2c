"""Named methods as compositions of a few lines: read them, and write your own.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from . import bagua as bagua
from .compressed_adam import compressed_adam as compressed_adam
from .ddp import ddp as ddp
