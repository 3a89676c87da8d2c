"""Whose state is it, and where does it lie? Three marks on leaves of a train state, and what follows from them.

A leaf without a mark is *agreed*: every worker holds the same value. `PerWorker` marks what differs, `Sharded` what is
cut over the workers, `OnHost` what lies in host memory. A state is written as one worker means it (a residual has the
shape of its parameter); `init_state` and `place` turn it into the global arrays of a mesh:

| mark | as written | global array | a worker sees |
|---|---|---|---|
| none | `[*s]` | `[*s]` | `[*s]` |
| `PerWorker` | `[*s]` | `[W, *s]` | `[*s]` |
| `Sharded` | `[*s]` | `[W·n]`, padded | `[n]` |
| `OnHost` | as inside | as inside, memory kind `pinned_host` | a host array |

Marks nest: `PerWorker(Sharded(x, axis="chip"), axis="pod")` is `[pods, chips·n]`.
"""

from .._marks import OnHost as OnHost
from .._marks import PerWorker as PerWorker
from .._marks import Sharded as Sharded
from ._flax import register_with_flax as _register_with_flax
from .base import consensus as consensus
from .base import cutting as cutting
from .base import init_state as init_state
from .base import padded as padded
from .base import place as place
from .base import refit as refit
from .base import resize as resize
from .base import shardings as shardings
from .base import spec_of as spec_of
from .base import specs as specs
from .base import workers as workers
from .zero_shardings import ZeroShardings as ZeroShardings
from .zero_shardings import zero_shardings as zero_shardings

_register_with_flax()
