"""ZeRO: optimizer state, gradients and parameters sharded over workers."""

from .gathered import gathered as gathered
from .gathered import gathered_scan as gathered_scan
from .gathered import shard as shard
from .norm import global_norm as global_norm
from .shardings import ZeroShardings as ZeroShardings
from .shardings import zero_shardings as zero_shardings
from .zero_redundancy import zero_redundancy as zero_redundancy
