"""Pairwise averaging, by whole models, CHOCO or PowerGossip: what two workers send, and how each updates its model."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...._core.types import Array, Number, PyTree, Shape
from ....compressors.compressor import Compressor
from ....compressors.scaled import contraction_form
from ....wire.low_rank import orthonormal, squarest_view
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


def choco_exchange(compressor: Compressor, *, step_size: Number) -> Exchange:
    """Both ends keep a copy `x̂` of each model, and send the compressed difference between their model and its copy.

        q_i = C(x_i - x̂_i);   x̂_i += q_i;   x_i += γ/2 (x̂_j - x̂_i)

    Compression errors remain in `x - x̂` and are sent later; they vanish as the models agree, and the sum of the models
    is kept exactly. Compressing whole models, with `compressed`, has errors in proportion to the models instead, and
    changes their sum.

    On the wire: the payload each way.

    State: two models per neighbor of a worker.

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
      Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
      communication", arXiv:1902.00340, 2019.
    """
    if not 0 < step_size <= 1:
        raise ValueError(f"step_size must be in (0, 1], got {step_size}")
    # An unbiased compressor is scaled to a contraction, or differences to the copies would grow.
    compressor = contraction_form(compressor, closest=True)
    encode_difference = numeric(partial(_encode_difference, compressor))
    update_copies = numeric(partial(_update_copies, compressor, step_size), outputs=3)

    def encode(params: Any, memory: Any, end: int, turn: int, words: Any) -> Any:
        # The two ends draw different numbers: a key that all share, as random-k has it, helps in sums only.
        words = np.array([*words, turn & 0xFFFFFFFF, 1 if end == ACTIVE else 2], np.uint32)
        return encode_difference(params, memory[0] if end == ACTIVE else memory[1], words)

    def settle(params: Any, memory: Any, request: Any, reply: Any, end: int, turn: int) -> tuple[Any, Any]:
        params, *copies = update_copies(params, *memory, request, reply, end)
        return params, tuple(copies)

    # The copies of the active and of the passive end begin at the model that all workers have.
    return Exchange("choco_exchange", lambda params, words: (params, params), encode, settle)


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
    step_size: Number,
    params: Any,
    active: Any,
    passive: Any,
    request: Any,
    reply: Any,
    end: Any,
) -> tuple[PyTree, PyTree, PyTree]:
    active, passive = _add_decoded(compressor, active, request), _add_decoded(compressor, passive, reply)
    # x_i += γ/2 (x̂_j - x̂_i)
    params = jax.tree.map(
        lambda x, a, p: x + (end * (step_size / 2) * (p - a)).astype(x.dtype), params, active, passive
    )
    return params, active, passive


def power_gossip(rank: int, *, seed: int = 0) -> Exchange:
    """Takes low-rank steps to the mean: `x_i += ½ (x_j - x_i) Q Qᵀ` and `x_i += ½ P Pᵀ (x_j - x_i)`, alternately.

    For a matrix, both ends know orthonormal directions Q and send `x Q`; from the two products both compute `D = (x_j -
    x_i) Q`, and the next exchange multiplies by `orthonormal(D)` from the other side. The exchanges of a pair are thus
    a power iteration on the difference of their models, and each half of an iteration removes the part that it found.
    It needs no step size and no copies of models, and keeps the sum of the two models.

    On the wire: for a matrix `[m, n]` `r·m` numbers each way in one exchange and `r·n` in the next; vectors, and
    matrices with a side of r or less, are sent whole.

    State: r directions of each matrix per neighbor of a worker.

    Args:
      rank: r. A larger rank agrees faster for more bytes, and the full rank is exact. Ranks 1, 2 and 4 ended 8, 3 and
        -1 % above whole models on digits that differ between workers (`benchmarks/reports/2026-11-starts`).
      seed: the seed of the initial directions, which both ends draw alike.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> from jaxdist.asynchronous import replay, rules
      >>> rule = rules.ad_psgd(jd.topology.ring, optax.sgd(0.1), exchange=rules.power_gossip(2))
      >>> task = replay.Task(jnp.ones((64, 32)), lambda x, batch: (x**2).sum(), lambda *job: None)
      >>> run = replay.run(rule, task, workers=2, seconds=2, timing_only=True)
      >>> run.links[0, 1] == 4 * 2 * (64 + 32 + 64)  # three exchanges of float32
      True

    References:
      Vogels, Karimireddy, Jaggi, "Practical low-rank communication compression in decentralized deep learning",
      arXiv:2008.01425, 2020.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    seed &= 0xFFFFFFFF
    draw_bases = numeric(partial(_draw_bases, rank, seed))
    # The two halves of an iteration: directions of columns multiply from the right, directions of rows from the left.
    sides = (False, True)
    projects = [numeric(partial(_project, rank, left)) for left in sides]
    steps = [numeric(partial(_step_along, rank, seed, left), outputs=2) for left in sides]

    def encode(params: Any, memory: Any, end: int, turn: int, words: Any) -> Any:
        return projects[turn % 2](params, memory[0])

    def settle(params: Any, memory: Any, request: Any, reply: Any, end: int, turn: int) -> tuple[Any, Any]:
        bases, words = memory
        step_words = np.array([*words, turn + 1], np.uint32)
        params, bases = steps[turn % 2](params, bases, request, reply, end, step_words)
        return params, (bases, words)

    return Exchange("power_gossip", lambda params, words: (draw_bases(params, words), words), encode, settle)


def _matrix_shape(shape: Shape, rank: int) -> tuple[int, int] | None:
    sides = squarest_view(shape) if len(shape) > 1 else (0, 0)
    # The paper clips the rank to the smaller side, but then an exchange along the larger side sends more numbers than
    # the matrix has.
    return sides if min(sides) > rank else None


def _draw_normal(seed: int, shape: tuple[int, ...], words: Any, turn: Any, leaf: int) -> Array:
    key = jax.random.key(np.uint32(seed))
    for word in (words[0], words[1], words[2], turn, leaf):
        key = jax.random.fold_in(key, word)
    return jax.random.normal(key, shape)


def _orthonormal_basis(columns: Array, dtype: Any) -> Array:
    return orthonormal([columns[None]])[0][0].T.astype(dtype)


def _draw_bases(rank: int, seed: int, params: PyTree, words: Any) -> list[Array]:
    def draw_basis(k: int, leaf: Any) -> Array:
        sides = _matrix_shape(leaf.shape, rank)
        # Leaves that are sent whole need no directions.
        if sides is None:
            return jnp.zeros(())
        return _orthonormal_basis(_draw_normal(seed, (sides[1], rank), words, 0, k), leaf.dtype)

    return [draw_basis(k, leaf) for k, leaf in enumerate(jax.tree.leaves(params))]


def _project(rank: int, left: bool, params: PyTree, bases: list[Array]) -> list[Array]:
    """Computes the products `x Q`, or `xᵀ P` from the left; leaves that are not compressed are sent whole."""

    def project_leaf(leaf: Any, q: Array) -> Any:
        sides = _matrix_shape(leaf.shape, rank)
        if sides is None:
            return leaf
        matrix = leaf.reshape(sides)
        return (matrix.T if left else matrix) @ q

    return [project_leaf(leaf, q) for leaf, q in zip(jax.tree.leaves(params), bases, strict=True)]


def _step_along(
    rank: int, seed: int, left: bool, params: Any, bases: list[Array], request: Any, reply: Any, end: Any, words: Any
) -> tuple[PyTree, list[Array]]:
    leaves, structure = jax.tree.flatten(params)
    moved, new_bases = [], []
    for k, (leaf, q, a, p) in enumerate(zip(leaves, bases, request, reply, strict=True)):
        # D = (x_j - x_i) Q, and x_i += ½ D Qᵀ.
        d, sides = p - a, _matrix_shape(leaf.shape, rank)
        change = d if sides is None else (q @ d.T if left else d @ q.T).reshape(leaf.shape)
        moved.append(leaf + (end * (change / 2)).astype(leaf.dtype))
        if sides is None:
            new_bases.append(q)
        else:
            # If the models agree along Q, D is zero and would stay so forever: draw new directions.
            fresh = _draw_normal(seed, d.shape, words, words[3], k).astype(d.dtype)
            new_bases.append(_orthonormal_basis(jnp.where(jnp.any(d != 0), d, fresh), leaf.dtype))
    return structure.unflatten(moved), new_bases
