"""Islands: several training jobs that meet over a shared folder or a bucket; any may die, join or be late."""

from .errors import AnchorDiffersError as AnchorDiffersError
from .errors import DamagedError as DamagedError
from .errors import IslandError as IslandError
from .errors import NameTakenError as NameTakenError
from .errors import RunMismatchError as RunMismatchError
from .errors import StoreUnusableError as StoreUnusableError
from .errors import TooFewIslandsError as TooFewIslandsError
from .island import Island as Island
from .join import join as join
from .options import Report as Report
from .status import RoundStatus as RoundStatus
from .status import RunStatus as RunStatus
from .status import read as read
from .status import status as status
from .store import SharedStore as SharedStore
from .store import bucket as bucket
from .store import folder as folder
from .store import memory as memory
