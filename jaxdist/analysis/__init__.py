"""Predicts what a step will do before it runs: its collectives and their bytes, memory, operations and time."""

from . import cost as cost
from . import pods as pods
from .base import Collective as Collective
from .base import Collectives as Collectives
from .codec_timing import codec_seconds as codec_seconds
from .collectives import collectives as collectives
from .hlo.reader import opcodes as opcodes
from .hlo.simulate_schedule import Span as Span
from .logical import logical_collectives as logical_collectives
from .measured import measure_link as measure_link
from .memory import Memory as Memory
from .memory import memory as memory
from .overlap import Overlap as Overlap
from .overlap import Overlapped as Overlapped
from .overlap import overlap as overlap
from .report import Widened as Widened
from .report import table as table
from .report import upcast_collectives as upcast_collectives
from .transfers import Transfers as Transfers
from .transfers import transfers as transfers
