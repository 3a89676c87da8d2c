"""Saves a train state to disk or a bucket, atomically and bit for bit, and restores it on any number of workers.

A checkpoint is a folder `path/<step>`, or the same files in a bucket:

| file | contents |
|---|---|
| `arrays/` | the leaves, each under its path in the tree, in orbax's format; every process writes its part |
| `manifest.json` | the shape, dtype and marks of each leaf, the step, and the caller's data |
| `SHA256SUMS` | a checksum of every file, for `sha256sum --check SHA256SUMS`; the last line is its own checksum |

It is written under a temporary name and renamed at the end by process 0, so that an interrupted save is never seen. In
a bucket, where nothing can be renamed, it counts once an object that lists it has been created.
Marks decide how a leaf is converted when the number of workers has changed. A checkpoint contains no code.
"""

from .errors import CheckpointDamagedError as CheckpointDamagedError
from .errors import CheckpointFullError as CheckpointFullError
from .errors import CheckpointPeerError as CheckpointPeerError
from .errors import CheckpointStoreError as CheckpointStoreError
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
