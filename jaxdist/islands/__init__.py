"""Islands: several training jobs that meet over a shared folder or a bucket; any may die, join or be late.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from .._stores.base import SharedStore as SharedStore
from .._stores.base import memory as memory
from .._stores.bucket import bucket as bucket
from .._stores.folder import folder as folder
from .base import AnchorDiffersError as AnchorDiffersError
from .base import DamagedError as DamagedError
from .base import IslandError as IslandError
from .base import NameTakenError as NameTakenError
from .base import OfflineError as OfflineError
from .base import Report as Report
from .base import RunMismatchError as RunMismatchError
from .base import RunMissingError as RunMissingError
from .base import StoreUnusableError as StoreUnusableError
from .base import TooFewIslandsError as TooFewIslandsError
from .island import Island as Island
from .join import join as join
from .status import RoundStatus as RoundStatus
from .status import RunStatus as RunStatus
from .status import read as read
from .status import status as status
