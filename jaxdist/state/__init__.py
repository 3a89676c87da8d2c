"""The placement of a train state, by three marks on its leaves.

A leaf without a mark is *replicated*: every worker has the same value. `PerWorker` marks leaves that differ, `Sharded`
those that are split over the workers, `OnHost` those in host memory. A state is written as that of one worker (a
residual has the shape of its parameter); `init_state` and `place` turn it into the global arrays of a mesh:

| mark | as written | global array | a worker sees |
|---|---|---|---|
| none | `[*s]` | `[*s]` | `[*s]` |
| `PerWorker` | `[*s]` | `[W, *s]` | `[*s]` |
| `Sharded` | `[*s]` | `[W·n]`, padded | `[n]` |
| `OnHost` | as inside | as inside, memory kind `pinned_host` | a host array |

Marks nest: `PerWorker(Sharded(x, axis="chip"), axis="pod")` is `[pods, chips·n]`.
"""

from .flax_marks import register_with_flax as _register_with_flax
from .marks import OnHost as OnHost
from .marks import PerWorker as PerWorker
from .marks import Sharded as Sharded
from .marks import cutting_marks as cutting_marks
from .marks import spec_of as spec_of
from .marks import with_value as with_value
from .placement import consensus as consensus
from .placement import init_state as init_state
from .placement import length_with_padding as length_with_padding
from .placement import place as place
from .placement import refit as refit
from .placement import resize as resize
from .placement import shardings as shardings
from .placement import specs as specs
from .placement import workers as workers

_register_with_flax()
