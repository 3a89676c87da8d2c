"""Pairwise averaging by CHOCO: compressed differences to public copies."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ...._core.checks import check_range
from ...._core.types import Number, PyTree
from ....compressors.compressor import Compressor
from ....compressors.scaled import contraction_form
from ...values import numeric
from .exchange import ACTIVE, Exchange


def choco_exchange(compressor: Compressor, *, step_size: Number) -> Exchange:
    """Both ends keep a copy `x̂` of each model, and send the compressed difference between their model and its copy.

        q_i = C(x_i - x̂_i);   x̂_i += q_i;   x_i += γ/2 (x̂_j - x̂_i)

    Compression errors remain in `x - x̂` and are sent later; they vanish as the models agree, and the sum of the models
    is kept exactly. Compressing whole models, with `compressed`, has errors in proportion to the models instead, and
    changes their sum.

    *On the wire*: the payload each way.

    *State*: two models per neighbor of a worker.

    Args:
      compressor: of one array; an unbiased one is shrunk to a contraction (`compressors.scaled`).
      step_size: γ. 1 is the mean if the compressor is lossless; too large a value diverges, too small a one is slow.
        Start at 0.5, as with `decentralized.choco`, and halve it if the loss grows.

    Raises:
      ValueError: the compressor states neither contraction nor variance.

    Examples:
      >>> import optax, jaxdist as jd
      >>> from jaxdist.asynchronous import rules
      >>> exchange = rules.choco_exchange(jd.top_k(0.1), step_size=0.2)
      >>> rules.ad_psgd(jd.topology.ring, optax.sgd(0.1), exchange=exchange).name
      'ad_psgd'

    References:
      Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
      Communication", arXiv:1902.00340, 2019.
    """
    check_range("step_size", step_size, 0, 1, ends="(]")
    # An unbiased compressor is scaled to a contraction, or differences to the copies would grow.
    compressor = contraction_form(compressor, closest=True)
    choco = _Choco(compressor, step_size)
    encode_difference, update_copies = numeric(choco.encode_difference), numeric(choco.update_copies, outputs=3)

    def encode(params: Any, memory: Any, end: int, turn: int, words: Any) -> Any:
        # The two ends draw different numbers: a key that all share, as random-k has it, helps in sums only.
        words = np.array([*words, turn & 0xFFFFFFFF, 1 if end == ACTIVE else 2], np.uint32)
        return encode_difference(params, memory[0] if end == ACTIVE else memory[1], words)

    def settle(params: Any, memory: Any, request: Any, reply: Any, end: int, turn: int) -> tuple[Any, Any]:
        params, *copies = update_copies(params, *memory, request, reply, end)
        return params, tuple(copies)

    # The copies of the active and of the passive end begin at the model that all workers have.
    return Exchange("choco_exchange", lambda params, words: (params, params), encode, settle)


class _Choco(NamedTuple):
    """The checked arguments of `choco_exchange`: a contraction and `γ`."""

    compressor: Compressor
    step_size: Number

    def encode_difference(self, params: PyTree, copy: PyTree, words: Any) -> list[Any]:
        # q_i = C(x_i - x̂_i)
        key = jax.random.key(words[0])
        for word in range(1, 5):
            key = jax.random.fold_in(key, words[word])
        differences = jax.tree.leaves(jax.tree.map(lambda x, hat: x - hat, params, copy))
        return [self.compressor.compress(leaf, jax.random.fold_in(key, k)) for k, leaf in enumerate(differences)]

    def _add_decoded(self, copy: PyTree, payloads: list[Any]) -> PyTree:
        # x̂_i += q_i
        leaves, structure = jax.tree.flatten(copy)
        return structure.unflatten(
            [hat + self.compressor.decompress(payload, hat) for hat, payload in zip(leaves, payloads, strict=True)]
        )

    def update_copies(
        self, params: Any, active: Any, passive: Any, request: Any, reply: Any, end: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        active, passive = self._add_decoded(active, request), self._add_decoded(passive, reply)
        # x_i += γ/2 (x̂_j - x̂_i)
        params = jax.tree.map(
            lambda x, a, p: x + (end * (self.step_size / 2) * (p - a)).astype(x.dtype), params, active, passive
        )
        return params, active, passive
