"""Pairwise averaging of whole models."""

from typing import Any

import jax

from ...values import numeric
from .exchange import Exchange


def whole_models() -> Exchange:
    """Both ends send their model and move to the mean: `x_i <- x_i + (x_j - x_i)/2`, with the models as sent.

    *On the wire*: a model each way.

    *State*: none.

    Examples:
      >>> from jaxdist.asynchronous import rules
      >>> rules.whole_models().name
      'whole_models'

    References:
      Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms", 2006.
    """

    def settle(params: Any, memory: Any, request: Any, reply: Any, end: int, turn: int) -> tuple[Any, Any]:
        return _add_half_difference(params, request, reply, end), memory

    return Exchange("whole_models", lambda params, words: (), lambda params, *rest: params, settle)


# A difference is added, and not the mean assigned, since the model may have changed since it was sent.
_add_half_difference = numeric(
    lambda params, request, reply, end: jax.tree.map(
        lambda x, a, p: x + (end * ((p - a) / 2)).astype(x.dtype), params, request, reply
    )
)
