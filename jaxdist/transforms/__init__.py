"""optax transformations that communicate, or that make communication safe."""

from .all_reduce import all_reduce as all_reduce
from .local_steps import Fragments as Fragments
from .local_steps import anchor as anchor
from .local_steps import balanced as balanced
from .local_steps import due_fragments as due_fragments
from .local_steps import local_steps as local_steps
from .local_steps import pulled as pulled
from .local_steps import slow_momentum as slow_momentum
from .local_steps import strided as strided
from .no_lo_co import no_lo_co as no_lo_co
from .optimizers import demo as demo
from .optimizers import dion as dion
from .optimizers import one_bit_adam as one_bit_adam
from .optimizers import qadam as qadam
from .optimizers import zero_one_adam as zero_one_adam
from .per_worker import per_worker as per_worker
from .skip_nonfinite import skip_nonfinite as skip_nonfinite
from .stats import stats as stats
from .zero import zero_redundancy as zero_redundancy
