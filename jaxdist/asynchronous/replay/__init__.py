"""Runs rules on a virtual clock: real gradients, simulated time."""

from ..errors import DeadlockError as DeadlockError
from ..errors import NonFiniteGradientError as NonFiniteGradientError
from ..errors import TooManyEventsError as TooManyEventsError
from .base import Result as Result
from .base import Task as Task
from .base import Trace as Trace
from .base import delays as delays
from .base import event_lines as event_lines
from .base import peer_delays as peer_delays
from .base import step_delays as step_delays
from .base import time_to_target as time_to_target
from .base import write_events as write_events
from .engine import ReplayState as ReplayState
from .run import Simulator as Simulator
from .run import restore as restore
from .run import run as run
from .run import save as save
from .run import simulator as simulator
