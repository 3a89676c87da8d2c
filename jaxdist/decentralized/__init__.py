"""Decentralized training: each worker averages with its neighbors in a graph."""

from .choco import choco as choco
from .consensus import consensus_distance as consensus_distance
from .consensus import mean_params as mean_params
from .cross_value_and_grad import cross_value_and_grad as cross_value_and_grad
from .d2 import d2 as d2
from .d_psgd import d_psgd as d_psgd
from .dcd_psgd import dcd_psgd as dcd_psgd
from .ecd_psgd import ecd_psgd as ecd_psgd
from .gossip import due_round as due_round
from .gossip import gossip as gossip
from .gradient_tracking import gradient_tracking as gradient_tracking
from .method import Method as Method
from .method import StepContext as StepContext
from .method import StepResult as StepResult
from .method import mix as mix
from .neighborhood_value_and_grad import neighborhood_value_and_grad as neighborhood_value_and_grad
from .osgp import OverlappedState as OverlappedState
from .osgp import osgp as osgp
from .quasi_global_adam import quasi_global_adam as quasi_global_adam
from .quasi_global_momentum import quasi_global_momentum as quasi_global_momentum
from .relay_sgd import relay_sgd as relay_sgd
from .saps_psgd import saps_psgd as saps_psgd
from .sgp import sgp as sgp
from .sharpness_aware import sharpness_aware as sharpness_aware
