"""Decentralized training: each worker averages with its neighbors in a graph."""

from .base import consensus_distance as consensus_distance
from .base import due_round as due_round
from .base import gossip as gossip
from .base import mean_params as mean_params
from .compressed import choco as choco
from .compressed import dcd_psgd as dcd_psgd
from .compressed import ecd_psgd as ecd_psgd
from .compressed import saps_psgd as saps_psgd
from .cross_gradients import cross_value_and_grad as cross_value_and_grad
from .cross_gradients import neighborhood_value_and_grad as neighborhood_value_and_grad
from .cross_gradients import sharpness_aware as sharpness_aware
from .heterogeneous import d2 as d2
from .heterogeneous import gradient_tracking as gradient_tracking
from .heterogeneous import quasi_global_adam as quasi_global_adam
from .heterogeneous import quasi_global_momentum as quasi_global_momentum
from .method import Method as Method
from .method import StepContext as StepContext
from .method import StepResult as StepResult
from .method import mix as mix
from .plain import OverlappedState as OverlappedState
from .plain import d_psgd as d_psgd
from .plain import osgp as osgp
from .plain import relay_sgd as relay_sgd
from .plain import sgp as sgp
