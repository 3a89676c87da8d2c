"""The processes of a job: initialization, consistency checks, heartbeats, preemption."""

from . import launch as launch
from .broadcast import assert_same as assert_same
from .broadcast import broadcast as broadcast
from .consistency import check_consistency as check_consistency
from .errors import AgreementError as AgreementError
from .errors import MismatchError as MismatchError
from .errors import MissingProcessError as MissingProcessError
from .errors import PortError as PortError
from .heartbeat import ProcessLost as ProcessLost
from .heartbeat import StepTimeout as StepTimeout
from .initialize import initialize as initialize
from .preemption import preemption_requested as preemption_requested
from .self_check import CollectiveError as CollectiveError
from .self_check import self_check as self_check
from .watchdog import Watchdog as Watchdog
from .watchdog import watchdog as watchdog
