"""Local updates: workers step on their own and synchronize every few steps."""

from .base import local_steps as local_steps
from .fragments import Fragments as Fragments
from .fragments import balanced as balanced
from .fragments import due_fragments as due_fragments
from .fragments import strided as strided
from .palsgd import palsgd as palsgd
from .palsgd import random_pull as random_pull
from .recipes import diloco as diloco
from .recipes import hidden_matrix as hidden_matrix
from .recipes import local_sgd as local_sgd
from .recipes import muloco as muloco
from .recipes import post_local_sgd as post_local_sgd
from .recipes import slow_momentum as slow_momentum
from .recipes import slowmo as slowmo
from .recipes import sparse_loco as sparse_loco
from .recipes import streaming_diloco as streaming_diloco
from .sampling import LossBiasedSampling as LossBiasedSampling
from .sampling import LossTable as LossTable
from .sampling import loss_biased_sampling as loss_biased_sampling
from .sampling import participation as participation
from .state import global_params as global_params
from .without_all_reduce import LocalSlowMomentumState as LocalSlowMomentumState
from .without_all_reduce import local_slow_momentum as local_slow_momentum
from .without_all_reduce import noloco as noloco
