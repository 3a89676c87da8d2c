"""Reducers: every worker's tree in, one replicated mean out.

A `seed` is that of the key of all draws, which differ between steps, leaves and, unless a code shares its key, workers.
"""

from .._core.dtypes import widen_like as widen_like
from ..wire.flat import step_key as step_key
from .accordion import CriticalRegime as CriticalRegime
from .accordion import CriticalRegimeState as CriticalRegimeState
from .accordion import accordion as accordion
from .accordion import critical_regime as critical_regime
from .accordion_batch import accordion_batch as accordion_batch
from .accordion_batch import with_regime as with_regime
from .adaptive import alq as alq
from .adaptive import amq as amq
from .base import Extras as Extras
from .base import Forms as Forms
from .base import Law as Law
from .base import Messages as Messages
from .base import Reduced as Reduced
from .base import Reducer as Reducer
from .base import cast_like as cast_like
from .base import exact as exact
from .base import from_generator as from_generator
from .combinators import per_leaf as per_leaf
from .combinators import reducer_schedule as reducer_schedule
from .combinators import with_stats as with_stats
from .compressed import compressed as compressed
from .dgc import dgc as dgc
from .feedback import ef21 as ef21
from .feedback import error_feedback as error_feedback
from .feedback import loco as loco
from .hierarchical import hierarchical as hierarchical
from .integers import integer_sum as integer_sum
from .integers import intsgd as intsgd
from .partitioned import bucketed as bucketed
from .partitioned import partitioned as partitioned
from .power_sgd import power_sgd as power_sgd
from .robust import median as median
from .robust import trimmed_mean as trimmed_mean
from .two_shot import majority_vote as majority_vote
from .two_shot import ring as ring
from .two_shot import two_shot as two_shot
