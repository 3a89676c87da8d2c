"""Models larger than a device: what is not needed now lies elsewhere, or is computed piece by piece."""

from .delayed import delayed as delayed
from .errors import StoreDamagedError as StoreDamagedError
from .errors import StoreError as StoreError
from .errors import StoreFullError as StoreFullError
from .host import host as host
from .nvme import nvme as nvme
from .store import Store as Store
from .store import Streamed as Streamed
from .store import StreamedStats as StreamedStats
from .tiled import tiled_dense as tiled_dense
from .tiled import tiled_mlp as tiled_mlp
from .tiled_flax import tiled_layers as tiled_layers
from .tiles import Tiled as Tiled
from .tiles import tile as tile
