"""Runs rules on real processes: Ray actors, one per worker, and wall time."""

from ..errors import ActorLost as ActorLost
from ..errors import NonFiniteGradient as NonFiniteGradient
from ..errors import Stalled as Stalled
from .run import Status as Status
from .run import run as run
