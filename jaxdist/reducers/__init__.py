"""Reducers: every worker's tree in, one replicated mean out.

A `seed` is that of the key of all draws, which differ between steps, leaves and, unless a code shares its key, workers.
"""

from .._core.dtypes import widen_like as widen_like
from .._core.trees import next_count as next_count
from ..wire.codec import step_key as step_key
from .accordion import accordion as accordion
from .accordion_batch import accordion_batch as accordion_batch
from .alq import alq as alq
from .amq import amq as amq
from .bucketed import bucketed as bucketed
from .compressed import compressed as compressed
from .compute_visible import compute_visible as compute_visible
from .critical_regime import CriticalRegime as CriticalRegime
from .critical_regime import CriticalRegimeState as CriticalRegimeState
from .critical_regime import critical_regime as critical_regime
from .dgc import dgc as dgc
from .ef21 import ef21 as ef21
from .error_feedback import error_feedback as error_feedback
from .exact import exact as exact
from .hierarchical import hierarchical as hierarchical
from .integer_sum import integer_sum as integer_sum
from .intsgd import intsgd as intsgd
from .loco import loco as loco
from .majority_vote import majority_vote as majority_vote
from .median import median as median
from .messages import as_generator as as_generator
from .messages import for_real_numbers as for_real_numbers
from .messages import from_generator as from_generator
from .partitioned import partitioned as partitioned
from .per_leaf import per_leaf as per_leaf
from .power_sgd import power_sgd as power_sgd
from .reducer import DrawState as DrawState
from .reducer import Extras as Extras
from .reducer import Forms as Forms
from .reducer import Law as Law
from .reducer import Messages as Messages
from .reducer import Reduced as Reduced
from .reducer import Reducer as Reducer
from .reducer import Use as Use
from .reducer import check_use as check_use
from .reducer import contraction_of as contraction_of
from .reducer import forward_forms as forward_forms
from .reducer import forward_limits as forward_limits
from .reducer import init_draws as init_draws
from .reducer import reason_against as reason_against
from .reducer import weakest as weakest
from .reducer_schedule import reducer_schedule as reducer_schedule
from .ring import ring as ring
from .row_sparse import row_sparse as row_sparse
from .trees import cast_like as cast_like
from .trees import is_map_params_placeholder as is_map_params_placeholder
from .trimmed_mean import trimmed_mean as trimmed_mean
from .two_shot import two_shot as two_shot
from .with_regime import with_regime as with_regime
from .with_stats import with_stats as with_stats
