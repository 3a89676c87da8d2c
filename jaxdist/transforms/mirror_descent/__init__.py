"""Online mirror descent: geometries, any-batch weighting, primal and dual averaging, regret."""

from .balls import ball as ball
from .balls import box as box
from .balls import euclidean as euclidean
from .base import Geometry as Geometry
from .diagonal import diagonal as diagonal
from .dual import anytime_minibatch as anytime_minibatch
from .entropy import entropy as entropy
from .p_norm import p_norm as p_norm
from .primal import mirror_descent as mirror_descent
from .regret import dynamic_regret as dynamic_regret
from .regret import path_length as path_length
from .regret import static_regret as static_regret
