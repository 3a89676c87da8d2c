"""Online learning with uneven batches: mirror descent and dual averaging."""

from .geometries import Geometry as Geometry
from .geometries import ball as ball
from .geometries import box as box
from .geometries import diagonal as diagonal
from .geometries import entropy as entropy
from .geometries import euclidean as euclidean
from .geometries import p_norm as p_norm
from .mirror_descent import any_batch as any_batch
from .mirror_descent import anytime_minibatch as anytime_minibatch
from .mirror_descent import mirror_descent as mirror_descent
from .regret import dynamic_regret as dynamic_regret
from .regret import path_length as path_length
from .regret import static_regret as static_regret
