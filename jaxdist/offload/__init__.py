"""Models larger than a device: state in host memory or on disk, and layers computed in tiles.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from .delayed import delayed as delayed
from .host import host as host
from .host_layers.base import HostLayers as HostLayers
from .host_layers.base import HostLayersState as HostLayersState
from .host_layers.base import host_layers as host_layers
from .host_layers.step import LayerState as LayerState
from .layers.stack import LayerStack as LayerStack
from .nvme.base import nvme as nvme
from .nvme.files import Store as Store
from .nvme.files import StoreDamagedError as StoreDamagedError
from .nvme.files import StoreError as StoreError
from .nvme.files import StoreFullError as StoreFullError
from .nvme.files import Streamed as Streamed
from .nvme.files import StreamedStats as StreamedStats
from .nvme_layers.base import StreamedLayers as StreamedLayers
from .nvme_layers.base import nvme_layers as nvme_layers
from .tiled import Tiled as Tiled
from .tiled import tile as tile
from .tiled import tiled_dense as tiled_dense
from .tiled import tiled_layers as tiled_layers
from .tiled import tiled_mlp as tiled_mlp
