"""Asynchronous training: methods as pure state machines, and a virtual clock that replays them with real gradients."""

from . import durations as durations
from . import links as links
from . import ray_engine as ray_engine
from . import replay as replay
from . import rules as rules
from .rule import SERVER as SERVER
from .rule import After as After
from .rule import Cancel as Cancel
from .rule import Compute as Compute
from .rule import Counted as Counted
from .rule import Message as Message
from .rule import Reduce as Reduce
from .rule import Role as Role
from .rule import Rule as Rule
from .rule import Send as Send
from .rule import Site as Site
from .rule import Stepped as Stepped
from .values import Encoded as Encoded
from .values import Lazy as Lazy
from .values import Spec as Spec
from .values import numeric as numeric
