"""Predicts what a step will do before it runs: its collectives and their bytes, memory, operations and time.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from . import cost as cost
from . import goodput as goodput
from . import pods as pods
from . import step_time as step_time
from .base import Collective as Collective
from .base import Collectives as Collectives
from .base import table as table
from .collectives import collectives as collectives
from .collectives import logical_collectives as logical_collectives
from .hlo_reader import opcodes as opcodes
from .measured import codec_seconds as codec_seconds
from .measured import measure_link as measure_link
from .memory import Memory as Memory
from .memory import memory as memory
from .overlap import Overlap as Overlap
from .overlap import Overlapped as Overlapped
from .overlap import Span as Span
from .overlap import overlap as overlap
from .references import bibtex as bibtex
from .transfers import Transfers as Transfers
from .transfers import transfers as transfers
from .upcast_collectives import WideSum as WideSum
from .upcast_collectives import upcast_collectives as upcast_collectives
