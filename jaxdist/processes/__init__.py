"""The processes of a job: initialization, consistency checks, heartbeats, preemption.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from . import launch as launch
from .broadcast import assert_same as assert_same
from .broadcast import broadcast as broadcast
from .cluster import AgreementError as AgreementError
from .cluster import MismatchError as MismatchError
from .cluster import MissingProcessError as MissingProcessError
from .cluster import PortError as PortError
from .consistency import check_consistency as check_consistency
from .initialize import initialize as initialize
from .preemption import preemption_requested as preemption_requested
from .self_check import CollectiveError as CollectiveError
from .self_check import self_check as self_check
from .watchdog import ProcessLostError as ProcessLostError
from .watchdog import StepTimeoutError as StepTimeoutError
from .watchdog import Watchdog as Watchdog
from .watchdog import watchdog as watchdog
