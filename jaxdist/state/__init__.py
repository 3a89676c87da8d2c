"""Where each array of a training state is kept: replicated, per worker, sharded or on the host."""

from .marks import OnHost as OnHost
from .marks import PerWorker as PerWorker
from .marks import Sharded as Sharded
from .placement import consensus as consensus
from .placement import cutting as cutting
from .placement import init_state as init_state
from .placement import padded as padded
from .placement import place as place
from .placement import refit as refit
from .placement import resize as resize
from .placement import shardings as shardings
from .placement import spec_of as spec_of
from .placement import specs as specs
from .placement import workers as workers
