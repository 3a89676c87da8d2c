"""Runs a training step on a mesh or in simulation, and feeds it batches."""

from ..comm.over import worker_key as worker_key
from .dirichlet_split import dirichlet_split as dirichlet_split
from .distribute import disagreement as disagreement
from .distribute import distribute as distribute
from .distribute import evaluate as evaluate
from .join_uneven import join_uneven as join_uneven
from .json_log import json_log as json_log
from .mesh import global_batch as global_batch
from .mesh import make_mesh as make_mesh
from .mesh import use_cpu_devices as use_cpu_devices
from .simulate import simulate as simulate
