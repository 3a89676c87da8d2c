"""Models larger than a device: state in host memory or on disk, and layers computed in tiles."""

from .host.base import host as host
from .host.delayed import delayed as delayed
from .nvme.base import nvme as nvme
from .nvme.errors import StoreDamagedError as StoreDamagedError
from .nvme.errors import StoreError as StoreError
from .nvme.errors import StoreFullError as StoreFullError
from .nvme.store import Store as Store
from .nvme.store import Streamed as Streamed
from .nvme.store import StreamedStats as StreamedStats
from .tiled import tiled_dense as tiled_dense
from .tiled import tiled_layers as tiled_layers
from .tiled import tiled_mlp as tiled_mlp
from .tiles import Tiled as Tiled
from .tiles import tile as tile
