"""Each worker's own gradients, and optax transformations that average them or surround those that do."""

from .accumulate import AccumulateState as AccumulateState
from .accumulate import accumulate as accumulate
from .all_reduce import all_reduce as all_reduce
from .averaged import averaged as averaged
from .dynamic_loss_scale import dynamic_loss_scale as dynamic_loss_scale
from .dynamic_loss_scale import loss_scale as loss_scale
from .in_plain_jit import per_worker_value_and_grad as per_worker_value_and_grad
from .local_value_and_grad import find_unused_parameters as find_unused_parameters
from .local_value_and_grad import local_value_and_grad as local_value_and_grad
from .overwritten import agree_on_maximum as agree_on_maximum
from .per_worker import per_worker as per_worker
from .quantized_state import quantized_state as quantized_state
from .skip_nonfinite import TooManySkipsError as TooManySkipsError
from .skip_nonfinite import check_skips as check_skips
from .skip_nonfinite import skip_nonfinite as skip_nonfinite
from .stats import stats as stats
