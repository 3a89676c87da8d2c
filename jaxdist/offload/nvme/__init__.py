"""Optimizer state on disk."""

from .base import nvme as nvme
from .errors import StoreDamagedError as StoreDamagedError
from .errors import StoreError as StoreError
from .errors import StoreFullError as StoreFullError
from .store import Store as Store
from .store import Streamed as Streamed
from .store import StreamedStats as StreamedStats
