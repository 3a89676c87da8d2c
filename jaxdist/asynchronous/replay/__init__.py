"""Runs rules on a virtual clock: real gradients, simulated time."""

from ..errors import DeadlockError as DeadlockError
from ..errors import NonFiniteGradientError as NonFiniteGradientError
from ..errors import TooManyEventsError as TooManyEventsError
from .engine import ReplayState as ReplayState
from .run import Simulator as Simulator
from .run import restore as restore
from .run import run as run
from .run import save as save
from .run import simulator as simulator
from .task import Task as Task
from .trace import Result as Result
from .trace import Trace as Trace
from .trace import delays as delays
from .trace import event_lines as event_lines
from .trace import peer_delays as peer_delays
from .trace import step_delays as step_delays
from .trace import time_to_target as time_to_target
from .trace import write_events as write_events
