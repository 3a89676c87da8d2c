"""PowerGossip: pairwise averaging by low-rank differences."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...._core.checks import check_range
from ...._core.types import Array, PyTree, Shape
from ....wire.low_rank import orthonormal, squarest_view
from ...values import numeric
from .exchange import Exchange


def power_gossip(rank: int, *, seed: int = 0) -> Exchange:
    """Takes low-rank steps to the mean: `x_i += ½ (x_j - x_i) Q Qᵀ` and `x_i += ½ P Pᵀ (x_j - x_i)`, alternately.

    For a matrix, both ends know orthonormal directions Q and send `x Q`; from the two products both compute `D = (x_j -
    x_i) Q`, and the next exchange multiplies by `orthonormal(D)` from the other side. The exchanges of a pair are thus
    a power iteration on the difference of their models, and each half of an iteration removes the part that it found.
    It needs no step size and no copies of models, and keeps the sum of the two models.

    *On the wire*: for a matrix `[m, n]` `r·m` numbers each way in one exchange and `r·n` in the next; vectors, and
    matrices with a side of r or less, are sent whole.

    *State*: r directions of each matrix per neighbor of a worker.

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
    check_range("rank", rank, 1, ends="[]")
    method = _PowerGossip(rank, seed & 0xFFFFFFFF)
    draw_bases = numeric(method.draw_bases)
    # The two halves of an iteration: directions of columns multiply from the right, directions of rows from the left.
    sides = (False, True)
    projects = [numeric(partial(method.project, left)) for left in sides]
    steps = [numeric(partial(method.step_along, left), outputs=2) for left in sides]

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


class _PowerGossip(NamedTuple):
    rank: int
    seed: int

    def draw_bases(self, params: PyTree, words: Any) -> list[Array]:
        def draw_basis(k: int, leaf: Any) -> Array:
            sides = _matrix_shape(leaf.shape, self.rank)
            # Leaves that are sent whole need no directions.
            if sides is None:
                return jnp.zeros(())
            return _orthonormal_basis(_draw_normal(self.seed, (sides[1], self.rank), words, 0, k), leaf.dtype)

        return [draw_basis(k, leaf) for k, leaf in enumerate(jax.tree.leaves(params))]

    def project(self, left: bool, params: PyTree, bases: list[Array]) -> list[Array]:
        """Computes the products `x Q`, or `xᵀ P` from the left; leaves that are not compressed are sent whole."""

        def project_leaf(leaf: Any, q: Array) -> Any:
            sides = _matrix_shape(leaf.shape, self.rank)
            if sides is None:
                return leaf
            matrix = leaf.reshape(sides)
            return (matrix.T if left else matrix) @ q

        return [project_leaf(leaf, q) for leaf, q in zip(jax.tree.leaves(params), bases, strict=True)]

    def step_along(
        self, left: bool, params: Any, bases: list[Array], request: Any, reply: Any, end: Any, words: Any
    ) -> tuple[PyTree, list[Array]]:
        leaves, structure = jax.tree.flatten(params)
        moved, new_bases = [], []
        for k, (leaf, q, a, p) in enumerate(zip(leaves, bases, request, reply, strict=True)):
            # D = (x_j - x_i) Q, and x_i += ½ D Qᵀ.
            d, sides = p - a, _matrix_shape(leaf.shape, self.rank)
            change = d if sides is None else (q @ d.T if left else d @ q.T).reshape(leaf.shape)
            moved.append(leaf + (end * (change / 2)).astype(leaf.dtype))
            if sides is None:
                new_bases.append(q)
            else:
                # If the models agree along Q, D is zero and would stay so forever: draw new directions.
                fresh = _draw_normal(self.seed, d.shape, words, words[3], k).astype(d.dtype)
                new_bases.append(_orthonormal_basis(jnp.where(jnp.any(d != 0), d, fresh), leaf.dtype))
        return structure.unflatten(moved), new_bases
