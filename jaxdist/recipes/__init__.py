"""Named methods as compositions of a few lines: read them, and write your own."""

from . import bagua as bagua
from .ddp import ddp as ddp
from .local_steps import diloco as diloco
from .local_steps import local_sgd as local_sgd
from .local_steps import post_local_sgd as post_local_sgd
from .local_steps import slowmo as slowmo
from .local_steps import streaming_diloco as streaming_diloco
from .muloco import hidden_matrix as hidden_matrix
from .muloco import muloco as muloco
from .palsgd import palsgd as palsgd
from .sparse_loco import sparse_loco as sparse_loco
