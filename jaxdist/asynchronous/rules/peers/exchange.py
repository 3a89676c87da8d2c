"""What two workers tell each other about their models in an exchange, and what each makes of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ...._core.types import PyTree
from ....compressors.base import Compressor
from ....wire.encoded import contraction_form
from ...values import numeric

ACTIVE, PASSIVE = 1, -1


class Exchange(NamedTuple):
    """How a pair averages: what each sends, and what both do then. Whatever it loses, the sum of the two models stays.

    One end, the active one, asks, and the other replies; both end with the same memory.

    Attributes:
      name: for messages.
      start: `start(params, words) -> memory`, from the model that all workers begin with and three numbers that tell
        this pair from others.
      encode: `encode(params, memory, end, turn, words) -> payload`, with `end` 1 for the active one and -1 for the
        other, and `turn` counting the exchanges of the pair.
      settle: `settle(params, memory, asked, replied, end, turn) -> (params, memory)`, with the payloads of both ends.
        The model may have moved since it was sent.
    """

    name: str
    start: Callable[[Any, Any], Any]
    encode: Callable[[Any, Any, int, int, Any], Any]
    settle: Callable[[Any, Any, Any, Any, int, int], tuple[Any, Any]]


def whole_models() -> Exchange:
    """Both send their model and take the mean: `x_i <- x_i + (x_j - x_i)/2`, on the models as they were sent.

    On the wire: a model each way.

    State: nothing.

    Returns:
      The exchange, which is the default.

    Example:
      >>> from jaxdist.asynchronous import rules
      >>> rules.whole_models().name
      'whole_models'

    References:
      Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms", 2006.
    """

    def pulled(params: PyTree, asked: PyTree, replied: PyTree, end: Any) -> PyTree:
        return jax.tree.map(lambda x, a, p: x + (end * ((p - a) / 2)).astype(x.dtype), params, asked, replied)

    pull = numeric(pulled)

    def settle(params: Any, memory: Any, asked: Any, replied: Any, end: int, turn: int) -> tuple[Any, Any]:
        return pull(params, asked, replied, end), memory

    return Exchange("whole_models", lambda params, words: (), lambda params, *rest: params, settle)


def choco_exchange(compressor: Compressor, *, step_size: float | int) -> Exchange:
    """Both know a copy `x̂` of either model, and send the code of what their own is ahead of it.

        q_i = C(x_i - x̂_i);   x̂_i += q_i;   x_i += γ/2 (x̂_j - x̂_i)

    Errors of the code stay in `x - x̂` and are sent later; they vanish as the models agree, and the sum of the models is
    kept exactly. A code on whole models, by `compressed`, has errors in proportion to the models instead, and moves
    their sum.

    On the wire: the payload of the code each way.

    State: for each neighbor of a worker two models.

    Args:
      compressor: the code of one array; an unbiased one is scaled by `1/(1+ω)`.
      step_size: γ. 1 is the mean where the code loses nothing; too high diverges. Start near the share of entries that
        are sent, or at 0.5 with 4 to 8 bits.

    Returns:
      The exchange.

    Raises:
      ValueError: `step_size` is outside (0, 1], or the code states neither contraction nor variance.

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
    code = contraction_form(compressor)

    def encoded(params: PyTree, known: PyTree, words: Any) -> list[Any]:
        key = jax.random.key(words[0])
        for word in range(1, 5):
            key = jax.random.fold_in(key, words[word])
        ahead = jax.tree.leaves(jax.tree.map(lambda x, hat: x - hat, params, known))
        return [code.compress(leaf, jax.random.fold_in(key, k)) for k, leaf in enumerate(ahead)]

    def added(known: PyTree, payload: list[Any]) -> PyTree:
        leaves, structure = jax.tree.flatten(known)
        return structure.unflatten([hat + code.decompress(one, hat) for hat, one in zip(leaves, payload, strict=True)])

    def settled(params: PyTree, active: PyTree, passive: PyTree, asked: Any, replied: Any, end: Any) -> tuple:
        active, passive = added(active, asked), added(passive, replied)

        def pulled(x, a, p):
            return x + (end * (step_size / 2) * (p - a)).astype(x.dtype)

        return jax.tree.map(pulled, params, active, passive), active, passive

    encoder, settler = numeric(encoded), numeric(settled, outputs=3)

    def encode(params: Any, memory: Any, end: int, turn: int, words: Any) -> Any:
        # Each end's own draws. A key that all share, as random-k has it, is of use in sums alone.
        own = np.array([*words, turn & 0xFFFFFFFF, 1 if end == ACTIVE else 2], np.uint32)
        return encoder(params, memory[0] if end == ACTIVE else memory[1], own)

    def settle(params: Any, memory: Any, asked: Any, replied: Any, end: int, turn: int) -> tuple[Any, Any]:
        params, active, passive = settler(params, *memory, asked, replied, end)
        return params, (active, passive)

    return Exchange("choco_exchange", lambda params, words: (params, params), encode, settle)
