"""Communication hidden behind computation."""

from .pipelined import Pipelined as Pipelined
from .pipelined import PipelinedState as PipelinedState
from .pipelined import pipelined as pipelined
from .rolling import TickTock as TickTock
from .rolling import TickTockState as TickTockState
from .rolling import Wave as Wave
from .wavelet import Layered as Layered
from .wavelet import tick_tock as tick_tock
