"""Online learning with uneven batches: mirror descent and dual averaging.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from .any_batch import any_batch as any_batch
from .anytime_minibatch import anytime_minibatch as anytime_minibatch
from .diagonal import diagonal as diagonal
from .entropy import entropy as entropy
from .euclidean import ball as ball
from .euclidean import box as box
from .euclidean import euclidean as euclidean
from .geometry import Geometry as Geometry
from .mirror_descent import mirror_descent as mirror_descent
from .p_norm import p_norm as p_norm
from .regret import dynamic_regret as dynamic_regret
from .regret import path_length as path_length
from .regret import static_regret as static_regret
