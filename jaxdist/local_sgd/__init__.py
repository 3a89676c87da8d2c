"""Local updates: workers step on their own and synchronize every few steps."""

from .diloco import diloco as diloco
from .fragments import Fragments as Fragments
from .fragments import balanced as balanced
from .fragments import due_fragments as due_fragments
from .fragments import strided as strided
from .local_sgd import local_sgd as local_sgd
from .local_slow_momentum import LocalSlowMomentumState as LocalSlowMomentumState
from .local_slow_momentum import local_slow_momentum as local_slow_momentum
from .local_steps import local_steps as local_steps
from .loss_biased_sampling import LossBiasedSampling as LossBiasedSampling
from .loss_biased_sampling import LossTable as LossTable
from .loss_biased_sampling import loss_biased_sampling as loss_biased_sampling
from .muloco import hidden_matrix as hidden_matrix
from .muloco import muloco as muloco
from .noloco import noloco as noloco
from .palsgd import palsgd as palsgd
from .participation import participation as participation
from .post_local_sgd import post_local_sgd as post_local_sgd
from .random_pull import random_pull as random_pull
from .slowmo import slow_momentum as slow_momentum
from .slowmo import slowmo as slowmo
from .sparse_loco import sparse_loco as sparse_loco
from .state import global_params as global_params
from .streaming_diloco import streaming_diloco as streaming_diloco
