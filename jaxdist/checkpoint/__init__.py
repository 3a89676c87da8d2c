"""A train state on disk and back: whole or not at all, in every bit, onto any number of workers.

A checkpoint is a folder `path/<step>`:

| file | holds |
|---|---|
| `arrays/` | the leaves, each under its path in the tree, as orbax writes them; every process writes its part |
| `manifest.json` | the shape, dtype and marks of each leaf, the step, and what else the run keeps |
| `SHA256SUMS` | a checksum of every file, for `sha256sum --check SHA256SUMS`; its last line is one of its own |

It is filled under another name and renamed at the end by process 0, so that one that was interrupted is never seen.
Marks decide what becomes of a leaf where the number of workers has changed. Nothing in it is code.
"""

from .errors import CheckpointDamagedError as CheckpointDamagedError
from .errors import CheckpointFullError as CheckpointFullError
from .errors import CheckpointPeerError as CheckpointPeerError
from .errors import CheckpointUnreadableError as CheckpointUnreadableError
from .errors import NoCheckpointLeftError as NoCheckpointLeftError
from .reader import Loaded as Loaded
from .reader import Resumed as Resumed
from .reader import latest as latest
from .reader import load as load
from .reader import restore as restore
from .reader import resume as resume
from .writer import Writer as Writer
from .writer import save as save
from .writer import writing as writing
