"""Distributed training in JAX that is cheap in bytes, memory and waiting."""

from ._core import interrupts as _interrupts  # noqa: F401 - before JAX, which takes seconds

# isort: split

import importlib as _importlib
import typing as _typing

from . import comm as comm
from . import compressors as compressors
from . import processes as processes
from . import reducers as reducers
from . import runtime as runtime
from . import schedule as schedule
from . import topology as topology
from . import transforms as transforms
from ._core.suggestions import refuse_name as _refuse_name
from ._core.suggestions import suggest_names as _suggest_names
from .compressors import qsgd as qsgd
from .compressors import top_k as top_k
from .processes import initialize as initialize
from .reducers import compressed as compressed
from .reducers import error_feedback as error_feedback
from .reducers import exact as exact
from .reducers import hierarchical as hierarchical
from .reducers import power_sgd as power_sgd
from .reducers import two_shot as two_shot
from .runtime import distribute as distribute
from .runtime import evaluate as evaluate
from .runtime import global_batch as global_batch
from .runtime import make_mesh as make_mesh
from .runtime import simulate as simulate
from .state import OnHost as OnHost
from .state import PerWorker as PerWorker
from .state import Sharded as Sharded
from .state import consensus as consensus
from .state import init_state as init_state
from .state import place as place
from .state import resize as resize
from .transforms import accumulate as accumulate
from .transforms import all_reduce as all_reduce
from .transforms import local_value_and_grad as local_value_and_grad
from .transforms import skip_nonfinite as skip_nonfinite

if _typing.TYPE_CHECKING:
    from . import analysis as analysis
    from . import asynchronous as asynchronous
    from . import checkpoint as checkpoint
    from . import decentralized as decentralized
    from . import islands as islands
    from . import local_sgd as local_sgd
    from . import offload as offload
    from . import online as online
    from . import optimizers as optimizers
    from . import overlap as overlap
    from . import publish as publish
    from . import recipes as recipes
    from . import testing as testing
    from . import zero as zero
    from .decentralized import gossip as gossip
    from .local_sgd import local_steps as local_steps
    from .zero import zero_redundancy as zero_redundancy
else:
    # The rooms that most programs do without, and where functions of theirs are: with them the import takes twice as
    # long. They are imported when a program first asks for them. Type checkers do not see `__getattr__`, which would
    # give them every name.
    _ROOMS = (
        "analysis",
        "asynchronous",
        "checkpoint",
        "decentralized",
        "islands",
        "local_sgd",
        "offload",
        "online",
        "optimizers",
        "overlap",
        "publish",
        "recipes",
        "testing",
        "zero",
    )
    _ROOM_OF = {"gossip": "decentralized", "local_steps": "local_sgd", "zero_redundancy": "zero"}

    def __getattr__(name: str) -> _typing.Any:
        if name not in _ROOMS and name not in _ROOM_OF:
            _refuse_name(__name__, name)
        room = _importlib.import_module(f".{_ROOM_OF.get(name, name)}", __name__)
        # Of this room, and of those that it has imported.
        _suggest_names()
        # Found without this function from here on.
        globals()[name] = found = getattr(room, name) if name in _ROOM_OF else room
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_ROOMS, *_ROOM_OF})


__version__ = "0.1.0"

_suggest_names()
