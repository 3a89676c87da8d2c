"""Distributed training in JAX that is cheap in bytes, memory and waiting."""

from . import analysis as analysis
from . import comm as comm
from . import compressors as compressors
from . import parallel as parallel
from . import placement as placement
from . import reducers as reducers
from . import schedule as schedule
from . import transforms as transforms
from .compressors import nuqsgd as nuqsgd
from .compressors import qsgd as qsgd
from .compressors import random_k as random_k
from .compressors import scaled_sign as scaled_sign
from .compressors import top_k as top_k
from .compressors.base import Compressor as Compressor
from .parallel import distribute as distribute
from .parallel import evaluate as evaluate
from .parallel import global_batch as global_batch
from .parallel import local_value_and_grad as local_value_and_grad
from .parallel import make_mesh as make_mesh
from .parallel import simulate as simulate
from .parallel import use_cpu_devices as use_cpu_devices
from .placement import OnHost as OnHost
from .placement import PerWorker as PerWorker
from .placement import Sharded as Sharded
from .placement import consensus as consensus
from .placement import init_state as init_state
from .placement import place as place
from .placement import resize as resize
from .reducers import Reduced as Reduced
from .reducers import Reducer as Reducer
from .reducers import bucketed as bucketed
from .reducers import by_leaf as by_leaf
from .reducers import compressed as compressed
from .reducers import ef21 as ef21
from .reducers import error_feedback as error_feedback
from .reducers import exact as exact
from .reducers import hierarchical as hierarchical
from .reducers import power_sgd as power_sgd
from .reducers import tracked as tracked
from .reducers import two_shot as two_shot
from .transforms import all_reduce as all_reduce
from .transforms import per_worker as per_worker
from .transforms import skip_nonfinite as skip_nonfinite
from .transforms import stats as stats

__version__ = "0.1.0"
