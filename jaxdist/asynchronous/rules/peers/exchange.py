"""Pairwise averaging: the payloads that two workers exchange, and how each updates its model."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ...._core.types import PyTree
from ....compressors.base import Compressor
from ....wire.encoded import contraction_form
from ...values import numeric

ACTIVE, PASSIVE = 1, -1


class Exchange(NamedTuple):
    """A method of averaging a pair of models. However lossy, it keeps the sum of the two models.

    The active end initiates an exchange, and the passive end replies; both end with the same memory.

    Attributes:
      name: for messages.
      start: `start(params, words) -> memory`, from the initial model of all workers and three numbers that identify the
        pair.
      encode: `encode(params, memory, end, turn, words) -> payload`; `end` is 1 for the active end and -1 for the
        passive one, and `turn` counts the exchanges of the pair.
      settle: `settle(params, memory, request, reply, end, turn) -> (params, memory)`, with the payloads of both ends.
        The model may have changed since it was sent.
    """

    name: str
    start: Callable[[Any, Any], Any]
    encode: Callable[[Any, Any, int, int, Any], Any]
    settle: Callable[[Any, Any, Any, Any, int, int], tuple[Any, Any]]


def whole_models() -> Exchange:
    """Both ends send their model and move to the mean: `x_i <- x_i + (x_j - x_i)/2`, with the models as sent.

    On the wire: a model each way.

    State: none.

    Returns:
      The exchange, which is the default.

    Example:
      >>> from jaxdist.asynchronous import rules
      >>> rules.whole_models().name
      'whole_models'

    References:
      Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms", 2006.
    """
    return Exchange("whole_models", lambda params, words: (), lambda params, *rest: params, _settle_whole)


def _half_difference(params: PyTree, request: PyTree, reply: PyTree, end: Any) -> PyTree:
    # A difference is added, and not the mean assigned, since the model may have changed since it was sent.
    return jax.tree.map(lambda x, a, p: x + (end * ((p - a) / 2)).astype(x.dtype), params, request, reply)


_add_half_difference = numeric(_half_difference)


def _settle_whole(params: Any, memory: Any, request: Any, reply: Any, end: int, turn: int) -> tuple[Any, Any]:
    return _add_half_difference(params, request, reply, end), memory


def choco_exchange(compressor: Compressor, *, step_size: float | int) -> Exchange:
    """Both ends keep a copy `x̂` of each model, and send the compressed difference between their model and its copy.

        q_i = C(x_i - x̂_i);   x̂_i += q_i;   x_i += γ/2 (x̂_j - x̂_i)

    Compression errors remain in `x - x̂` and are sent later; they vanish as the models agree, and the sum of the models
    is kept exactly. Compressing whole models, with `compressed`, has errors in proportion to the models instead, and
    changes their sum.

    On the wire: the payload each way.

    State: two models per neighbor of a worker.

    Args:
      compressor: the compressor of one array; an unbiased one is scaled by `1/(1+ω)`.
      step_size: γ. 1 is the mean if the compressor is lossless; too large a value diverges. Start near the fraction of
        entries that are sent, or at 0.5 with 4 to 8 bits.

    Returns:
      The exchange.

    Raises:
      ValueError: `step_size` is outside (0, 1], or the compressor states neither contraction nor variance.

    Example:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import rules
      >>> exchange = rules.choco_exchange(jd.top_k(0.1), step_size=0.2)
      >>> rules.ad_psgd(jd.topology.ring, optax.sgd(0.1), exchange=exchange).name
      'ad_psgd'

    References:
      Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
      communication", arXiv:1902.00340, 2019.
    """
    if not 0 < step_size <= 1:
        raise ValueError(f"step_size must be in (0, 1], got {step_size}")
    # An unbiased compressor is scaled to a contraction, or differences to the copies would grow.
    compressor = contraction_form(compressor)
    encode = partial(_encode_choco, numeric(partial(_encode_difference, compressor)))
    settle = partial(_settle_choco, numeric(partial(_update_copies, compressor, step_size), outputs=3))
    return Exchange("choco_exchange", lambda params, words: (params, params), encode, settle)


def _encode_choco(encode: Callable[..., Any], params: Any, memory: Any, end: int, turn: int, words: Any) -> Any:
    # The two ends draw different numbers: a key that all share, as random-k has it, helps in sums only.
    words = np.array([*words, turn & 0xFFFFFFFF, 1 if end == ACTIVE else 2], np.uint32)
    return encode(params, memory[0] if end == ACTIVE else memory[1], words)


def _settle_choco(
    update: Callable[..., Any], params: Any, memory: Any, request: Any, reply: Any, end: int, turn: int
) -> tuple[Any, Any]:
    params, active, passive = update(params, *memory, request, reply, end)
    return params, (active, passive)


def _encode_difference(compressor: Compressor, params: PyTree, copy: PyTree, words: Any) -> list[Any]:
    # q_i = C(x_i - x̂_i)
    key = jax.random.key(words[0])
    for word in range(1, 5):
        key = jax.random.fold_in(key, words[word])
    differences = jax.tree.leaves(jax.tree.map(lambda x, hat: x - hat, params, copy))
    return [compressor.compress(leaf, jax.random.fold_in(key, k)) for k, leaf in enumerate(differences)]


def _add_decoded(compressor: Compressor, copy: PyTree, payloads: list[Any]) -> PyTree:
    # x̂_i += q_i
    leaves, structure = jax.tree.flatten(copy)
    return structure.unflatten(
        [hat + compressor.decompress(payload, hat) for hat, payload in zip(leaves, payloads, strict=True)]
    )


def _update_copies(
    compressor: Compressor,
    step_size: float | int,
    params: PyTree,
    active: PyTree,
    passive: PyTree,
    request: Any,
    reply: Any,
    end: Any,
) -> tuple[PyTree, PyTree, PyTree]:
    active, passive = _add_decoded(compressor, active, request), _add_decoded(compressor, passive, reply)

    def move_leaf(x: Any, a: Any, p: Any) -> Any:
        # x_i += γ/2 (x̂_j - x̂_i)
        return x + (end * (step_size / 2) * (p - a)).astype(x.dtype)

    return jax.tree.map(move_leaf, params, active, passive), active, passive
