"""Models larger than a device: what is not needed now lies elsewhere, or is computed piece by piece."""

from .host import delayed as delayed
from .host import host as host
from .nvme import Store as Store
from .nvme import StoreDamagedError as StoreDamagedError
from .nvme import StoreError as StoreError
from .nvme import StoreFullError as StoreFullError
from .nvme import Streamed as Streamed
from .nvme import StreamedStats as StreamedStats
from .nvme import nvme as nvme
from .tiled import tiled_dense as tiled_dense
from .tiled import tiled_mlp as tiled_mlp
from .tiled_flax import tiled_layers as tiled_layers
from .tiles import Tiled as Tiled
from .tiles import tile as tile
