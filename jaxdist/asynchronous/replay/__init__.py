"""Runs rules on a virtual clock: real gradients, simulated time."""

from ..errors import Deadlock as Deadlock
from ..errors import NonFiniteGradient as NonFiniteGradient
from ..errors import TooManyEvents as TooManyEvents
from .run import Simulator as Simulator
from .run import run as run
from .run import simulator as simulator
from .saving import restore as restore
from .saving import save as save
from .state import ReplayState as ReplayState
from .task import Task as Task
from .trace import Result as Result
from .trace import Trace as Trace
from .trace import delays as delays
from .trace import event_lines as event_lines
from .trace import peer_delays as peer_delays
from .trace import step_delays as step_delays
from .trace import time_to_target as time_to_target
from .trace import write_events as write_events
