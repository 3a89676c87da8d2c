"""PowerSGD: low-rank approximation by a warm-started power iteration, which a plain all-reduce can carry."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._typing import Array, Int, PyTree, Shape
from ..compressors.base import working_dtype
from .base import Reduced, Reducer, Wire, drive, from_rounds


class PowerSGDState(NamedTuple):
    """Agreed. `q` has a right factor `[m, r]` for each compressed leaf and `[0]` for the others."""

    count: Int[Array, ""]
    q: PyTree


class _Group(NamedTuple):
    """Leaves with one matrix shape, stacked."""

    leaves: list[int]
    shape: tuple[int, int]
    rank: int
    dtype: jnp.dtype


def squarest_view(shape: Shape) -> tuple[int, int]:
    """The matrix view of a leaf: cut between leading and trailing dimensions where rows + columns are fewest.

    Example:
      >>> from jaxdist.reducers.power_sgd import squarest_view
      >>> squarest_view((3, 3, 128, 256)), squarest_view((512, 8, 64))
      ((1152, 256), (512, 512))
    """
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(reversed(cuts), key=sum)


def power_sgd(
    rank: int,
    *,
    min_compression_rate: float = 2.0,
    start_step: int = 0,
    warm_start: bool = True,
    own: Literal["local", "paper"] = "local",
    matrix_view: Callable[[Shape], tuple[int, int]] = squarest_view,
    seed: int = 0,
) -> Reducer:
    """Approximates the mean of matrices `M_w [n, m]`: `P = qr(mean(M_w Q))`, `Q = mean(M_wᵀ P)`, `mean = P Qᵀ`.

    `Q` is carried to the next step, so that a few steps are one long power iteration. Put it inside `error_feedback`:
    alone it is biased and loses accuracy. `own = P Q_wᵀ` with this worker's `Q_w`: its mean over workers is the mean,
    and residuals stay bounded. The paper's `own="paper"` (every worker subtracts the mean) lets the residuals of
    different workers drift apart for ever, which float32 does not survive on unlike data.

    *On the wire* for leaves `[m, n]`: two all-reduces, of `r·n` floats for each matrix, then of `r·m` for each matrix
    and every uncompressed leaf whole; together `4·(r·Σ(n+m) + Σ rest)` bytes, of which a worker sends `2(W-1)/W`. All
    in float32 (float64 leaves in float64).

    *State* (agreed): a count, and `Q [m, r]` for each compressed leaf.

    Args:
      rank: `r`, cut to `min(n, m)`. Higher is more accurate and sends more: 1 is for when bytes are everything, 4 for
        language models, 2 for convolutional nets; double it when the loss falls behind.
      min_compression_rate: a leaf is compressed if `(n+m)·r·rate < n·m`. Lower compresses more leaves; 0 compresses all
        matrices.
      start_step: plain means before it. Early gradients are the hardest to compress: try 10 % of training if the loss
        suffers. It keeps both programs in the step.
      warm_start: keep `Q`. Without it each step draws a new one, and accuracy falls.
      own: see above.
      matrix_view: from the shape of a leaf of two or more dimensions to `(n, m)`.
      seed: of the first `Q`, equal on all workers.

    Returns:
      The reducer.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.power_sgd(rank=1, min_compression_rate=0.0)
      >>> w = jnp.outer(jnp.arange(3.0), jnp.arange(4.0))  # of rank 1: nothing is lost
      >>> reduced, _ = reducer.reduce(w, reducer.init(w), jd.comm.alone())
      >>> bool(jnp.allclose(reduced.mean, w, atol=1e-5))
      True

    References:
      Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
      arXiv 1905.13727, 2019. The local residual: Vogels, Karimireddy, Jaggi, "PowerGossip", arXiv 2008.01425, 2020.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if min_compression_rate < 0:
        raise ValueError(f"min_compression_rate must not be negative, got {min_compression_rate}")
    if start_step < 0:
        raise ValueError(f"start_step must not be negative, got {start_step}")
    if own not in ("local", "paper"):
        raise ValueError(f'own must be "local" or "paper", got {own!r}')

    def view(shape) -> tuple[int, int, int] | None:
        """`(n, m, r)` of a leaf to compress."""
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = matrix_view(shape)
        r = min(rank, n, m)
        return (n, m, r) if (n + m) * r * min_compression_rate < n * m else None

    def draw(leaf, index, count):
        found = view(leaf.shape)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), index)
        shape = (0,) if found is None else (found[1], found[2])
        return jax.random.normal(key, shape, working_dtype(leaf.dtype))

    def draw_all(like, count):
        leaves, structure = jax.tree.flatten(like)
        return structure.unflatten([draw(leaf, i, count) for i, leaf in enumerate(leaves)])

    def init(like):
        return PowerSGDState(jnp.zeros((), jnp.int32), draw_all(like, 0))

    def rounds(updates, state, comm, **agreed):
        del agreed
        leaves, structure = jax.tree.flatten(updates)
        factors = structure.flatten_up_to(state.q if warm_start else draw_all(updates, state.count))
        groups, rest = _group(leaves, view)
        # Grouping equal shapes: one batched product and one batched QR, however many layers there are.
        matrices = [_stack(leaves, group) for group in groups]
        right = [jnp.stack([factors[i] for i in group.leaves]) for group in groups]

        left = yield Wire(mean=[jnp.einsum("knm,kmr->knr", m, q) for m, q in zip(matrices, right)])
        # The mean's scale does not matter. QR of a zero matrix has identity columns, so a dead factor recovers.
        left = [jnp.linalg.qr(p)[0] for p in left.mean]
        # Pᵀ M rather than Mᵀ P: XLA:CPU would transpose the whole of M for the latter.
        local = [jnp.einsum("knr,knm->krm", p, m) for p, m in zip(left, matrices)]
        whole = [leaves[i].astype(working_dtype(leaves[i].dtype)) for i in rest]
        received = yield Wire(mean=[*local, *whole])
        mean_right, rest_means = received.mean[: len(groups)], received.mean[len(groups) :]

        means, owns, new_factors = list(leaves), list(leaves), list(factors)
        for group, p, q_mean, q_local, q_old in zip(groups, left, mean_right, local, right):
            approximation = jnp.einsum("knr,krm->knm", p, q_mean)
            contribution = approximation if own == "paper" else jnp.einsum("knr,krm->knm", p, q_local)
            # After a zero gradient Q says nothing about the next one: the older one does.
            alive = jnp.any(q_mean != 0, axis=(1, 2), keepdims=True)
            q_new = jnp.where(alive, jnp.swapaxes(q_mean, 1, 2), q_old)
            for k, i in enumerate(group.leaves):
                means[i] = approximation[k].reshape(leaves[i].shape).astype(leaves[i].dtype)
                owns[i] = contribution[k].reshape(leaves[i].shape).astype(leaves[i].dtype)
                new_factors[i] = q_new[k]
        for i, mean in zip(rest, rest_means, strict=True):
            means[i] = mean.astype(leaves[i].dtype)
        reduced = Reduced(structure.unflatten(means), comm.varying(structure.unflatten(owns)))
        count = jnp.where(state.count < jnp.iinfo(jnp.int32).max, state.count + 1, state.count)
        return reduced, PowerSGDState(count, structure.unflatten(new_factors))

    if start_step == 0:
        return from_rounds("power_sgd", init, rounds)

    def compress(comm, updates, state):
        return drive(rounds(updates, state, comm), comm)

    def wait(comm, updates, state):
        leaves, structure = jax.tree.flatten(updates)

        def plain():
            received = yield Wire(mean=leaves)
            return structure.unflatten(received.mean)

        return Reduced(drive(plain(), comm), comm.varying(updates)), state._replace(count=state.count + 1)

    def reduce(updates, state, comm, **agreed):
        del agreed
        with jax.named_scope("power_sgd"):
            return comms.cond(state.count >= start_step, compress, wait, comm, updates, state)

    return Reducer(init, reduce)


def _group(leaves: list[Array], view: Callable) -> tuple[list[_Group], list[int]]:
    """Leaves to compress, by matrix shape, and the others."""
    groups: dict[tuple, _Group] = {}
    rest = []
    for i, leaf in enumerate(leaves):
        found = view(leaf.shape)
        if found is None:
            rest.append(i)
            continue
        dtype = jnp.dtype(working_dtype(leaf.dtype))
        groups.setdefault((found, dtype), _Group([], found[:2], found[2], dtype)).leaves.append(i)
    return list(groups.values()), rest


def _stack(leaves: list[Array], group: _Group) -> Array:
    return jnp.stack([leaves[i].reshape(group.shape).astype(group.dtype) for i in group.leaves])
