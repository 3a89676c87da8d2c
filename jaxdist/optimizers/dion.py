"""Dion: orthonormal updates of low rank, whose momentum keeps what was not sent."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, Like, PyTree, State, Updates
from ..reducers.base import Messages, run
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import LearningRate, rate_at
from ..transforms.local_gradients import check_leaves, local_gradients
from ..wire.flat import alike
from ..wire.low_rank import STACKED_SIZE, orthonormal, outer
from .base import descend

EPSILON = 1e-8


class DionState(NamedTuple):
    """Agreed: a count, a right factor `[m, r]` for each matrix, the state of the optimizer of the other leaves.

    Per worker: the momentum of each matrix, in float32 or better.
    """

    count: Int[Array, ""]
    momentum: PerWorker
    q: PyTree
    rest: State

    communicates = True


class _View(NamedTuple):
    """A leaf as a matrix `[n, m]`, and the rank of its updates."""

    n: int
    m: int
    rank: int


def every_matrix(path: str, leaf: Like) -> bool:
    """Leaves of two or more dimensions are matrices."""
    del path
    return len(leaf.shape) > 1


def dion(
    learning_rate: LearningRate,
    *,
    rank: int | None = None,
    rank_fraction: float | int | None = None,
    momentum: float | int = 0.95,
    weight_decay: float | int = 0.0,
    is_matrix: Callable[[str, Like], bool] = every_matrix,
    rest: optax.GradientTransformation | None = None,
    seed: int = 0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Updates matrices by the strongest directions of their momentum, all with equal strength, and sends only those.

    One step of a warm power iteration finds them. With the momentum `M_w [n, m]` of worker `w`, the agreed `Q [m, r]`
    and the learning rate `η`: `M_w += g_w`, `P = orth(mean(M_w Q))`, `R_w = M_wᵀ P`, `R = mean(R_w)`,
    `M_w -= (1-μ) P R_wᵀ`, `Q` = `R` with its columns scaled to length 1, `x -= η (√(m/n) P Qᵀ + λ x)`. What `P` and `R`
    did not catch stays in the momentum, which is the error feedback too. Each worker subtracts its own `R_w`: the mean
    momentum is the same as with the averaged `R` of the paper, but there the workers' momenta drift apart for ever.

    Kernels in JAX are `[in, out]`, transposed against the paper's, hence the scale `√(m/n)`. Leaves of more dimensions
    are matrices `[all but the last, last]`.

    *On the wire* for matrices `[n, m]`: two all-reduces, of `r·n` floats for each matrix, then of `r·m` for each matrix
    and every other leaf whole; together `4·(Σ r(n+m) + Σ rest)` bytes, of which a worker sends `2(W-1)/W`. All in
    float32 (float64 leaves in float64).

    *State*: agreed, a count, `Q` and the state of `rest`; per worker the momentum of the matrices.

    Args:
      learning_rate: `η`, a number or a schedule. Updates have the same size whatever the gradient's, so that one rate
        serves layers of all widths; start at 0.01.
      rank: `r`, cut to `min(n, m)`. Higher follows the momentum better; give this or `rank_fraction`.
      rank_fraction: `r` as a part of `min(n, m)`, rounded up. 1 is full rank, 1/4 is nearly as good on large models.
      momentum: `μ`. With full rank the momentum is `μ M` after each step.
      weight_decay: `λ`, decoupled.
      is_matrix: `is_matrix(path, leaf)` with the path as `"layers/0/kernel"`: which leaves of two or more dimensions
        are matrices that map activations. Embeddings and the last layer do better as `rest`.
      rest: updates the other leaves from their mean gradients; by default `optax.adamw` with the learning rate and the
        weight decay given here. Its usual rate is a tenth of that of the matrices.
      seed: of the first `Q`, equal on all workers.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients whose updates contain the learning rate. Its `update` takes
      `examples=`, as that of `all_reduce`.

    Raises:
      ValueError: an argument is out of range, or not exactly one of `rank` and `rank_fraction` is given; at trace time,
        what `all_reduce` raises.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.dion(0.1, rank=2, axis=None)
      >>> params, gradient = jnp.zeros((2, 2)), jnp.array([[0.0, 4.0], [-1.0, 0.0]])
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(gradient, state, params)
      >>> bool(jnp.allclose(updates, jnp.array([[0.0, -0.1], [0.1, 0.0]]), atol=1e-5))  # not 4 to 1
      True

    References:
      Ahn, Xu, Abreu, Fan, Magakyan, Sharma, Zhan, Langford, "Dion: Distributed Orthonormalized Updates", arXiv
      2504.05295, 2025. The local residual: Vogels, Karimireddy, Jaggi, "PowerGossip", arXiv 2008.01425, 2020.
    """
    if (rank is None) == (rank_fraction is None):
        raise ValueError(f"give rank or rank_fraction, and not both, got rank={rank}, rank_fraction={rank_fraction}")
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if rank_fraction is not None and not 0 < rank_fraction <= 1:
        raise ValueError(f"rank_fraction must be in (0, 1], got {rank_fraction}")
    check_range("momentum", momentum, 0, 1)
    check_range("weight_decay", weight_decay, 0)
    inner = optax.adamw(learning_rate, weight_decay=weight_decay) if rest is None else rest

    def view(path, leaf) -> _View | None:
        shape = leaf.shape
        if len(shape) < 2 or 0 in shape or not is_matrix(_name(path), leaf):
            return None
        n, m = math.prod(shape[:-1]), shape[-1]
        wanted = rank or math.ceil((rank_fraction or 0) * min(n, m))
        return _View(n, m, min(wanted, n, m))

    def masked():
        others = lambda tree: jax.tree_util.tree_map_with_path(lambda path, x: view(path, x) is None, tree)  # noqa: E731
        return optax.masked(optax.with_extra_args_support(inner), others)

    def init(params) -> State:
        check_leaves(params)

        # Not arrays without entries: where they differ between workers, JAX forgets how they lie, and compiles again.
        def zeros(path, leaf):
            found = view(path, leaf)
            return optax.MaskedNode() if found is None else jnp.zeros(leaf.shape, working_dtype(leaf.dtype))

        numbers = itertools.count()

        def draw(path, leaf):
            found = view(path, leaf)
            if found is None:
                return optax.MaskedNode()
            key = jax.random.fold_in(jax.random.key(seed), next(numbers))
            return jax.random.normal(key, (found.m, found.rank), working_dtype(leaf.dtype))

        return DionState(
            jnp.zeros((), jnp.int32),
            bind(PerWorker(jax.tree_util.tree_map_with_path(zeros, params)), axis),
            jax.tree_util.tree_map_with_path(draw, params),
            masked().init(params),
        )

    def rounds(leaves, views, momenta, factors):
        """Returns directions of matrices and mean gradients of other leaves, new momenta and new factors."""
        groups = _group(leaves, views)
        others = [i for i, found in enumerate(views) if found is None]
        matrices = [
            jnp.stack([(momenta[i] + leaves[i]).reshape(views[i].n, views[i].m) for i in members]) for members in groups
        ]
        right = [jnp.stack([factors[i] for i in members]) for members in groups]
        received = yield Messages(mean=[jnp.einsum("knm,kmr->knr", m, q) for m, q in zip(matrices, right)])
        left = orthonormal(received.mean)
        # Pᵀ M rather than Mᵀ P: XLA:CPU would transpose the whole of M for the latter.
        local = [jnp.einsum("krn,knm->krm", p, m) for p, m in zip(left, matrices)]
        received = yield Messages(mean=[*local, *(leaves[i] for i in others)])

        out, momenta, factors = list(leaves), list(momenta), list(factors)
        for members, m, p, own, mean, old in zip(groups, matrices, left, local, received.mean, right):
            columns = jnp.swapaxes(p, 1, 2)
            kept = m - (1 - momentum) * outer(columns, own)
            lengths = jnp.sqrt(jnp.sum(jnp.square(mean), axis=2, keepdims=True))
            scaled = mean / (lengths + EPSILON)
            direction = math.sqrt(m.shape[2] / m.shape[1]) * outer(columns, scaled)
            # A column without length says nothing about the next gradient: the older one does.
            new = jnp.swapaxes(jnp.where(lengths > 0, scaled, jnp.swapaxes(old, 1, 2)), 1, 2)
            for k, i in enumerate(members):
                out[i], momenta[i] = (x[k].reshape(leaves[i].shape) for x in (direction, kept))
                factors[i] = new[k]
        for i, mean in zip(others, received.mean[len(groups) :], strict=True):
            out[i] = mean
        return out, momenta, factors

    def update(updates, state, params=None, *, examples=None, **extra_args) -> tuple[Updates, State]:
        with jax.named_scope("dion"):
            gradients, comm = local_gradients(updates, axis, examples)
            named, structure = jax.tree_util.tree_flatten_with_path(gradients)
            views = [view(path, leaf) for path, leaf in named]
            momenta, factors = (structure.flatten_up_to(tree) for tree in (state.momentum.value, state.q))
            out, momenta, factors = run(rounds([leaf for _, leaf in named], views, momenta, factors), comm)
            rate = rate_at(learning_rate, state.count)
            descended = jax.tree.leaves(descend(structure.unflatten(out), rate, weight_decay, params, updates))
            mixed = [
                mean.astype(like.dtype) if found is None else step
                for found, step, mean, like in zip(views, descended, out, jax.tree.leaves(updates), strict=True)
            ]
            mixed, inner_state = masked().update(structure.unflatten(mixed), state.rest, params, **extra_args)
            kept = with_value(state.momentum, structure.unflatten(momenta))
            return mixed, DionState(next_count(state.count), kept, structure.unflatten(factors), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _group(leaves: list[Array], views: list[_View | None]) -> list[list[int]]:
    """Matrices of one view and dtype together; large ones alone, since stacking copies them."""
    matrices = [i for i, found in enumerate(views) if found is not None]

    def kind(i):
        return views[i], leaves[i].dtype, i if leaves[i].size > STACKED_SIZE else None

    return [[matrices[k] for k in members] for members in alike(matrices, kind)]
