"""PowerSGD: low-rank approximation by a warm-started power iteration, which a plain all-reduce can carry."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import comm as comms
from .._typing import Array, Int, PyTree, Shape
from ..compressors.base import working_dtype
from .base import Reduced, Reducer, Wire, drive, from_rounds


class PowerSGDState(NamedTuple):
    """Agreed. `q` has a right factor `[m, r]` for each compressed leaf and `[0]` for the others."""

    count: Int[Array, ""]
    q: PyTree


# Up to this many elements, matrices of one shape are stacked: every product of its own adds to the compile time. Larger
# ones stay apart, since stacking copies them.
STACKED_SIZE = 2**16


class _Group(NamedTuple):
    """Leaves with one matrix shape, to be stacked; or a single large one."""

    leaves: list[int]
    shape: tuple[int, int]
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
    min_compression_rate: float | int = 2.0,
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
        matrices = [_stack(leaves, group) for group in groups]
        right = [jnp.stack([factors[i] for i in group.leaves]) for group in groups]

        left = yield Wire(mean=[jnp.einsum("knm,kmr->knr", m, q) for m, q in zip(matrices, right)])
        left = _orthonormal(left.mean)  # the mean's scale does not matter
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
    """Leaves to compress, small ones by matrix shape, and the others."""
    groups: dict[tuple, _Group] = {}
    rest = []
    for i, leaf in enumerate(leaves):
        found = view(leaf.shape)
        if found is None:
            rest.append(i)
            continue
        n, m, _ = found
        dtype = jnp.dtype(working_dtype(leaf.dtype))
        alone = i if n * m > STACKED_SIZE else None
        groups.setdefault((found, dtype, alone), _Group([], (n, m), dtype)).leaves.append(i)
    return list(groups.values()), rest


def _stack(leaves: list[Array], group: _Group) -> Array:
    return jnp.stack([leaves[i].reshape(group.shape).astype(group.dtype) for i in group.leaves])


def _orthonormal(factors: Sequence[Array]) -> list[Array]:
    """An orthonormal basis of the columns of each matrix in stacks `[k, n, r]`: Q of a Householder QR.

    A zero matrix gives columns of the identity, so a dead factor recovers. Plain operations rather than
    `jnp.linalg.qr`: the batched LAPACK call of jaxlib 0.10 waits, on a thread of the pool, for tasks that need threads
    of the same pool, and hangs when devices or groups take all of them.

    Stacks of one rank and of similar height share one loop, for the sake of compile time: rows of zeros below a matrix
    stay zeros.
    """
    alike: dict[tuple, list[int]] = {}
    for i, factor in enumerate(factors):
        _, n, r = factor.shape
        alike.setdefault((1 << (n - 1).bit_length(), r, factor.dtype), []).append(i)
    bases: list[Any] = [None] * len(factors)
    for members in alike.values():
        height = max(factors[i].shape[1] for i in members)
        # Transposed, so that what a reflection reads is contiguous.
        rows = [jnp.swapaxes(factors[i], 1, 2) for i in members]
        q = _householder(jnp.concatenate([jnp.pad(x, [(0, 0), (0, 0), (0, height - x.shape[2])]) for x in rows]))
        start = 0
        for i in members:
            k, n, _ = factors[i].shape
            bases[i] = jnp.swapaxes(q[start : start + k, :, :n], 1, 2)
            start += k
    return bases


def _householder(a: Array) -> Array:
    """Transposed Q of the QR of transposed matrices, `[k, r, n] -> [k, r, n]`."""
    r, n = a.shape[1:]
    position = lax.broadcasted_iota(jnp.int32, (1, n), 1)

    def reflect(x, v):
        """`x (I - 2 v vᵀ)`, in full precision wherever products are shortened by default."""
        along = jnp.einsum("krn,kn->kr", x, v, precision=lax.Precision.HIGHEST)
        return x - 2 * along[:, :, None] * v[:, None, :]

    def eliminate(j, carry):
        """Below the diagonal, column `j` becomes zero."""
        a, normals = carry
        column = jnp.where(position >= j, lax.dynamic_index_in_dim(a, j, 1, keepdims=False), 0)
        # Scaled, so that squares of tiny and huge entries neither vanish nor overflow.
        largest = jnp.max(jnp.abs(column), axis=1, keepdims=True)
        column = column / jnp.where(largest == 0, 1, largest)
        norm = jnp.sqrt(jnp.sum(jnp.square(column), axis=1, keepdims=True))
        # Away from the diagonal entry, where nothing cancels.
        v = jnp.where(position == j, column + jnp.where(column < 0, -norm, norm), column)
        length = jnp.sqrt(jnp.sum(jnp.square(v), axis=1, keepdims=True))
        v = v / jnp.where(length == 0, 1, length)
        return reflect(a, v), lax.dynamic_update_index_in_dim(normals, v, j, 1)

    def accumulate(i, q):
        return reflect(q, lax.dynamic_index_in_dim(normals, r - 1 - i, 1, keepdims=False))

    _, normals = lax.fori_loop(0, r, eliminate, (a, jnp.zeros_like(a)))
    unit = jnp.zeros_like(a) + jnp.eye(r, n, dtype=a.dtype)[None]
    return lax.fori_loop(0, r, accumulate, unit)
