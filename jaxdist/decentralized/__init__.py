"""Decentralized training: each worker averages with its neighbors in a graph."""

from .base import consensus_distance as consensus_distance
from .base import gossip as gossip
from .choco import choco as choco
from .cross_gradients import cross_value_and_grad as cross_value_and_grad
from .cross_gradients import neighborhood_value_and_grad as neighborhood_value_and_grad
from .cross_gradients import sharpness_aware as sharpness_aware
from .d2 import d2 as d2
from .d_psgd import d_psgd as d_psgd
from .difference import dcd_psgd as dcd_psgd
from .difference import ecd_psgd as ecd_psgd
from .gradient_tracking import gradient_tracking as gradient_tracking
from .method import Method as Method
from .method import StepContext as StepContext
from .method import StepResult as StepResult
from .mixing import due_round as due_round
from .mixing import mix as mix
from .quasi_global import quasi_global_adam as quasi_global_adam
from .quasi_global import quasi_global_momentum as quasi_global_momentum
from .relay import relay_sgd as relay_sgd
from .sgp import sgp as sgp
