"""Models larger than a device: state in host memory or on disk, and layers computed in tiles."""

from .host.base import host as host
from .host.delayed import delayed as delayed
from .layers.base import nvme_layers as nvme_layers
from .layers.stack import LayerStack as LayerStack
from .layers.stack import StreamedLayers as StreamedLayers
from .nvme.base import nvme as nvme
from .nvme.store import Store as Store
from .nvme.store import StoreDamagedError as StoreDamagedError
from .nvme.store import StoreError as StoreError
from .nvme.store import StoreFullError as StoreFullError
from .nvme.store import Streamed as Streamed
from .nvme.store import StreamedStats as StreamedStats
from .tiled import Tiled as Tiled
from .tiled import tile as tile
from .tiled import tiled_dense as tiled_dense
from .tiled import tiled_layers as tiled_layers
from .tiled import tiled_mlp as tiled_mlp
