"""Runs rules on real processes: Ray actors, one per worker, and wall time."""

from ..errors import ActorLostError as ActorLostError
from ..errors import NonFiniteGradientError as NonFiniteGradientError
from ..errors import StalledError as StalledError
from .driver import Status as Status
from .run import run as run
