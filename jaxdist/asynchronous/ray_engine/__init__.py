"""Rules on real processes: Ray actors, one for each worker, and wall time."""

from ..replay.errors import NonFiniteGradient as NonFiniteGradient
from .errors import Stalled as Stalled
from .errors import WorkerLost as WorkerLost
from .run import Status as Status
from .run import run as run
