"""Distributed training in JAX that is cheap in bytes, memory and waiting."""

from ._core import interrupts as _interrupts  # noqa: F401 - before JAX, which takes seconds

# isort: split

from . import analysis as analysis
from . import asynchronous as asynchronous
from . import checkpoint as checkpoint
from . import comm as comm
from . import compressors as compressors
from . import decentralized as decentralized
from . import islands as islands
from . import local_sgd as local_sgd
from . import offload as offload
from . import online as online
from . import optimizers as optimizers
from . import overlap as overlap
from . import processes as processes
from . import publish as publish
from . import recipes as recipes
from . import reducers as reducers
from . import runtime as runtime
from . import schedule as schedule
from . import topology as topology
from . import transforms as transforms
from . import zero as zero
from .compressors import qsgd as qsgd
from .compressors import top_k as top_k
from .decentralized import gossip as gossip
from .local_sgd import local_steps as local_steps
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
from .zero import zero_redundancy as zero_redundancy

__version__ = "0.1.0"
