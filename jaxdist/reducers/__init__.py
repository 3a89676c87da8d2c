"""Every worker's tree in, one agreed mean out."""

from .accordion import accordion as accordion
from .accordion import accordion_batch as accordion_batch
from .base import Reduced as Reduced
from .base import Reducer as Reducer
from .base import Wire as Wire
from .base import from_rounds as from_rounds
from .bucketed import bucketed as bucketed
from .by_leaf import by_leaf as by_leaf
from .compressed import compressed as compressed
from .critical_regime import CriticalRegime as CriticalRegime
from .critical_regime import CriticalRegimeState as CriticalRegimeState
from .critical_regime import critical_regime as critical_regime
from .exact import exact as exact
from .feedback import ef21 as ef21
from .feedback import error_feedback as error_feedback
from .hierarchical import hierarchical as hierarchical
from .integers import integer_sum as integer_sum
from .integers import intsgd as intsgd
from .loco import loco as loco
from .majority import majority_vote as majority_vote
from .power_sgd import power_sgd as power_sgd
from .ring import ring as ring
from .switch_at import switch_at as switch_at
from .tracked import tracked as tracked
from .two_shot import two_shot as two_shot
