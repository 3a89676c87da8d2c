"""Processes of one job: how they find each other, whether they agree, and what happens when one does not answer."""

from .agree import agree as agree
from .errors import AgreementError as AgreementError
from .errors import MismatchError as MismatchError
from .errors import MissingProcessError as MissingProcessError
from .errors import PortError as PortError
from .initialize import initialize as initialize
from .peers import StepTimeout as StepTimeout
from .peers import WorkerLost as WorkerLost
from .preemption import preempted as preempted
from .watchdog import Watchdog as Watchdog
from .watchdog import watchdog as watchdog
