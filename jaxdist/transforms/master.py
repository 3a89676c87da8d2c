"""Master copies of parameters, in higher precision, of which the parameters are the rounding."""

from .._core.dtypes import round_to
from .._core.types import Array


def follow_parameter(master: Array, parameter: Array) -> Array:
    """Moves a master as far as something else has moved its parameter since the last update: `m += p - round(m)`.

    What the dtype of the parameter cannot hold stays in the master.
    """
    return master + (parameter.astype(master.dtype) - round_to(master, parameter.dtype))
