"""Optimizers that communicate inside their update.

Provisional: arguments may be renamed in a minor version without an old name.
"""

from .demo import demo as demo
from .dion import dion as dion
from .one_bit_adam import one_bit_adam as one_bit_adam
from .qadam import qadam as qadam
from .zero_one_adam import zero_one_adam as zero_one_adam
