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
from .from_disk import Loaded as Loaded
from .from_disk import Resumed as Resumed
from .from_disk import latest as latest
from .from_disk import load as load
from .from_disk import restore as restore
from .from_disk import resume as resume
from .to_disk import Writer as Writer
from .to_disk import save as save
from .to_disk import writing as writing
