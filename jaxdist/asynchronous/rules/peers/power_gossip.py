"""PowerGossip: a pair exchanges its models along a few directions, which a power iteration finds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...._core.types import Array, PyTree, Shape
from ....wire.low_rank import orthonormal, squarest_view
from ...values import numeric
from .exchange import Exchange


def power_gossip(rank: int, *, seed: int = 0) -> Exchange:
    """A low-rank step towards the mean: `x_i += ½ (x_j - x_i) Q Qᵀ`, then `x_i += ½ P Pᵀ (x_j - x_i)`, in turns.

    For a matrix both ends know orthonormal directions Q and send `x Q`; from the two products both have `D = (x_j -
    x_i) Q`, and `Q <- orthonormal(D)` is where the next exchange multiplies from the other side. So a pair's exchanges
    are one power iteration on the difference of their models, each half of which takes out the part that it has found.
    No step size, and no copies of models; the sum of the two models is kept.

    On the wire: for a matrix `[m, n]` `r·m` numbers each way in one exchange and `r·n` in the next; vectors, and
    matrices with a side of r or less, whole.

    State: for each neighbor of a worker r directions of each matrix.

    Args:
      rank: r. 1 or 2 is a start; more agree faster for more bytes, and of r sides all is exact.
      seed: of the first directions, which both ends draw alike.

    Returns:
      The exchange.

    Raises:
      ValueError: `rank` is below 1.

    Example:
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

    def view(shape: Shape) -> tuple[int, int] | None:
        sides = squarest_view(shape) if len(shape) > 1 else (0, 0)
        # The paper cuts the rank to the smaller side; from the larger side that sends more than the matrix has.
        return sides if min(sides) > rank else None

    def drawn(shape: tuple[int, int], words: Any, turn: Any, leaf: int) -> Array:
        key = jax.random.key(np.uint32(seed & 0xFFFFFFFF))
        for word in (words[0], words[1], words[2], turn, leaf):
            key = jax.random.fold_in(key, word)
        return jax.random.normal(key, shape)

    def basis(columns: Array, dtype: Any) -> Array:
        return orthonormal([columns[None]])[0][0].T.astype(dtype)

    def started(params: PyTree, words: Any) -> list[Array]:
        out = []
        for k, leaf in enumerate(jax.tree.leaves(params)):
            sides = view(leaf.shape)
            out.append(jnp.zeros(()) if sides is None else basis(drawn((sides[1], rank), words, 0, k), leaf.dtype))
        return out

    def half(left: bool) -> tuple[Any, Any]:
        """Directions of columns, which multiply from the right, or of rows from the left."""

        def encoded(params: PyTree, bases: list[Array]) -> list[Array]:
            out = []
            for leaf, q in zip(jax.tree.leaves(params), bases, strict=True):
                sides = view(leaf.shape)
                matrix = leaf if sides is None else leaf.reshape(sides)
                out.append(leaf if sides is None else (matrix.T if left else matrix) @ q)
            return out

        def settled(params: PyTree, bases: list[Array], asked: Any, replied: Any, end: Any, words: Any) -> tuple:
            leaves, structure = jax.tree.flatten(params)
            moved, found = [], []
            for k, (leaf, q, a, p) in enumerate(zip(leaves, bases, asked, replied, strict=True)):
                d, sides = p - a, view(leaf.shape)
                change = d if sides is None else (q @ d.T if left else d @ q.T).reshape(leaf.shape)
                moved.append(leaf + (end * (change / 2)).astype(leaf.dtype))
                if sides is None:
                    found.append(q)
                else:  # where the models agree nothing is found: another draw, or zeros would stay for ever
                    fresh = drawn(d.shape, words, words[3], k).astype(d.dtype)
                    found.append(basis(jnp.where(jnp.any(d != 0), d, fresh), leaf.dtype))
            return structure.unflatten(moved), found

        return numeric(encoded), numeric(settled, outputs=2)

    sides, begin = (half(False), half(True)), numeric(started)

    def start(params: Any, words: Any) -> Any:
        return begin(params, words), words

    def encode(params: Any, memory: Any, end: int, turn: int, words: Any) -> Any:
        return sides[turn % 2][0](params, memory[0])

    def settle(params: Any, memory: Any, asked: Any, replied: Any, end: int, turn: int) -> tuple[Any, Any]:
        bases, words = memory
        at = np.array([*words, turn + 1], np.uint32)
        params, bases = sides[turn % 2][1](params, bases, asked, replied, end, at)
        return params, (bases, words)

    return Exchange("power_gossip", start, encode, settle)
