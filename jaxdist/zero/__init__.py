"""ZeRO: optimizer state, gradients and parameters sharded over workers."""

from .base import zero_redundancy as zero_redundancy
from .gathered import gathered as gathered
from .gathered import gathered_scan as gathered_scan
from .gathered import shard as shard
from .norm import global_norm as global_norm
from .shards import ZeroShardings as ZeroShardings
from .shards import zero_shardings as zero_shardings
