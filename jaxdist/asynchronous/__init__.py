"""Asynchronous training: methods as pure state machines, run on a virtual clock or on real processes.

Experimental: may change or go in any version.
"""

from . import durations as durations
from . import links as links
from . import ray_engine as ray_engine
from . import replay as replay
from . import rules as rules
from .protocol import SERVER as SERVER
from .protocol import After as After
from .protocol import Cancel as Cancel
from .protocol import Compute as Compute
from .protocol import GradientRecord as GradientRecord
from .protocol import Message as Message
from .protocol import Reduce as Reduce
from .protocol import Role as Role
from .protocol import Rule as Rule
from .protocol import Send as Send
from .protocol import Site as Site
from .protocol import StepRecord as StepRecord
from .values import Encoded as Encoded
from .values import Lazy as Lazy
from .values import Spec as Spec
from .values import numeric as numeric
