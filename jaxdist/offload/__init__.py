"""Models larger than a device: what is not needed now lies elsewhere, or is computed piece by piece."""

from .errors import StoreDamagedError as StoreDamagedError
from .errors import StoreError as StoreError
from .errors import StoreFullError as StoreFullError
from .nvme import Store as Store
from .nvme import Streamed as Streamed
from .nvme import StreamedStats as StreamedStats
from .nvme import nvme as nvme
