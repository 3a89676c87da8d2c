"""Collectives: the only module that communicates between workers of a mesh.

A `Comm` is a group of workers as one of them sees it. Its functions map over pytrees, type-check under `shard_map`'s
replication checking, and give the same numbers under `vmap` (simulation). It works around five problems:

- Results that are equal on all workers (a mean, a gather) are typed *invariant*, so that they may leave `shard_map` as
  replicated state.
- XLA:CPU widens bf16 and fp8 in every collective: they are sent as u16 and u8 words.
- XLA:CPU's reduce-scatter returns wrong numbers for large chunks (jax-ml/jax#40830): there it is an all-to-all and a
  local sum. The choice is `lax.platform_dependent`, so a program compiled for a TPU on a CPU machine gets the TPU's
  form.
- XLA:CPU packs, copies and unpacks the arrays of an all-reduce even if there is a single worker: then nothing is
  compiled but the identity.
- XLA:TPU makes an all-reduce, twice the bytes, of a gather or a reduce-scatter of arrays that do not fill its tiles,
  or that have an odd number of them: there they are padded. On square slices (4x4, 8x8) it does so with every
  reduce-scatter over one axis of all chips; two axes, one for each side of the square, get two real ones.
"""

from .base import Comm as Comm
from .base import Sent as Sent
from .base import alone as alone
from .base import cond as cond
from .base import count_sent as count_sent
from .base import nested as nested
from .base import split_group as split_group
from .base import switch as switch
from .base import total_bytes as total_bytes
from .over import over as over
