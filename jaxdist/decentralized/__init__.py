"""Decentralized training: each worker averages with its neighbors in a graph."""

from .base import consensus_distance as consensus_distance
from .base import gossip as gossip
from .choco import choco as choco
from .cross_gradients import cross_value_and_grad as cross_value_and_grad
from .cross_gradients import neighbourhood_value_and_grad as neighbourhood_value_and_grad
from .cross_gradients import sharpness_aware as sharpness_aware
from .d2 import d2 as d2
from .d_psgd import d_psgd as d_psgd
from .difference import dcd as dcd
from .difference import ecd as ecd
from .gradient_tracking import gradient_tracking as gradient_tracking
from .method import Method as Method
from .method import Turn as Turn
from .method import Turned as Turned
from .mixing import due_round as due_round
from .mixing import mix as mix
from .quasi_global import qg_adam as qg_adam
from .quasi_global import qg_momentum as qg_momentum
from .relay import relay_sgd as relay_sgd
from .sgp import sgp as sgp
