"""Dion: orthonormal low-rank updates whose momentum keeps the part that was not sent."""

import itertools
import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_count, check_range
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, Like, PyTree, State, Updates
from ..reducers.messages import run
from ..reducers.reducer import Messages
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import LearningRate, descend, rate_at
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, local_gradients
from ..wire.buffers import group_alike
from ..wire.low_rank import STACKED_SIZE, orthonormal, outer

# Keeps columns of length zero finite.
EPSILON = 1e-8


class DionState(NamedTuple):
    """Per worker: the momentum of each matrix, in float32 or better.

    Replicated: a right factor `q` `[m, r]` for each matrix, and `rest`, the state of the optimizer of the other leaves.
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
    """Selects all leaves of two or more dimensions."""
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
    """Updates matrices along the strongest directions of their momentum, all equally far, and sends only those.

    With the momentum `M_w [n, m]` of worker `w`, the replicated `Q [m, r]` and the learning rate `η`: `M_w += g_w`,
    `P = orth(mean(M_w Q))`, `R_w = M_wᵀ P`, `R = mean(R_w)`, `M_w -= (1-μ) P R_wᵀ`, `Q` = `R` with its columns scaled
    to length 1, `x -= η (√(m/n) P Qᵀ + λ x)`. Leaves of more dimensions are matrices `[all but the last, last]`.

    The updates contain the learning rate, and `update` takes `examples=` and `active=`, which weight gradients as in
    `all_reduce`; without any examples the gradient is zero, and the momentum goes on.

    *On the wire* for matrices `[n, m]`: two all-reduces, of `r·n` floats for each matrix, then of `r·m` and all entries
    of the other leaves; together `4·(Σ r(n+m) + Σ rest)` bytes, of which a worker sends `2(W-1)/W`, in float32 (float64
    leaves in float64).

    *State*: replicated, `Q` and the state of `rest`; per worker the momentum of the matrices.

    Args:
      learning_rate: `η`, a number or a schedule; start at 0.03, for layers of all widths.
      rank: `r`, at most `min(n, m)`. Higher follows the momentum better; give this or `rank_fraction`.
      rank_fraction: `r` as a part of `min(n, m)`, rounded up. 1/4 is nearly as good as 1 on large models.
      momentum: `μ`. With full rank the momentum is `μ M` after each step.
      weight_decay: `λ`, decoupled.
      is_matrix: `is_matrix(path, leaf)`, with paths like `"layers/0/kernel"`: of the leaves with two or more
        dimensions, those that map activations. Embeddings and the last layer do better as `rest`.
      rest: updates the other leaves from their mean gradients; by default `optax.adamw` with this learning rate and
        weight decay. Its usual rate is a tenth of `η`.
      seed: of the first `Q`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.dion(0.1, rank=2, axis=None)
      >>> params, gradient = jnp.zeros((2, 2)), jnp.array([[0.0, 4.0], [-1.0, 0.0]])
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = jax.jit(tx.update)(gradient, state, params)
      >>> bool(jnp.allclose(updates, jnp.array([[0.0, -0.1], [0.1, 0.0]]), atol=1e-5))  # not 4 to 1
      True

    References:
      Ahn et al., "Dion: Distributed Orthonormalized Updates", arXiv:2504.05295, 2025. The local residual: Vogels,
      Karimireddy, Jaggi, "Practical low-rank communication compression in decentralized deep learning",
      arXiv:2008.01425, 2020.
    """
    if (rank is None) == (rank_fraction is None):
        raise ValueError(f"give rank or rank_fraction, and not both, got rank={rank}, rank_fraction={rank_fraction}")
    if rank is not None:
        check_count("rank", rank, 1)
    if rank_fraction is not None:
        check_range("rank_fraction", rank_fraction, 0, 1, ends="(]")
    check_range("momentum", momentum, 0, 1)
    check_range("weight_decay", weight_decay, 0)
    others = optax.adamw(learning_rate, weight_decay=weight_decay) if rest is None else rest
    others = with_extra_args(others)
    tx = _Dion(learning_rate, rank, rank_fraction, momentum, weight_decay, is_matrix, others, seed, axis)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _Dion(NamedTuple):
    learning_rate: LearningRate
    rank: int | None
    rank_fraction: float | int | None
    momentum: float | int
    weight_decay: float | int
    is_matrix: Callable[[str, Like], bool]
    rest: optax.GradientTransformationExtraArgs
    seed: int
    axis: AxisNames

    def init(self, params: PyTree) -> State:
        check_leaves(params)
        # Each matrix folds its number into the seed.
        numbers = itertools.count()

        # No empty arrays for the other leaves: JAX forgets the sharding of those that differ between workers, and
        # compiles again.
        def zeros(path, leaf):
            view = self._view(path, leaf)
            return optax.MaskedNode() if view is None else jnp.zeros(leaf.shape, working_dtype(leaf.dtype))

        def draw(path, leaf):
            view = self._view(path, leaf)
            if view is None:
                return optax.MaskedNode()
            key = jax.random.fold_in(jax.random.key(self.seed), next(numbers))
            return jax.random.normal(key, (view.m, view.rank), working_dtype(leaf.dtype))

        return DionState(
            jnp.zeros((), jnp.int32),
            bind(PerWorker(jax.tree_util.tree_map_with_path(zeros, params)), self.axis),
            jax.tree_util.tree_map_with_path(draw, params),
            self._rest().init(params),
        )

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        examples: Any = None,
        active: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        with jax.named_scope("dion"):
            gradients, comm = local_gradients(updates, self.axis, examples, active, name="dion")
            paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
            leaves = [leaf for _, leaf in paths]
            views = [self._view(path, leaf) for path, leaf in paths]
            momenta, factors = (structure.flatten_up_to(tree) for tree in (state.momentum.value, state.q))
            out, momenta, factors = run(_rounds(self.momentum, leaves, views, momenta, factors), comm)
            rate = rate_at(self.learning_rate, state.count)
            # Matrices take the step -η (direction + λ x); the mean gradients of the other leaves go to their optimizer.
            steps = jax.tree.leaves(descend(structure.unflatten(out), rate, self.weight_decay, params, updates))
            mixed = [
                mean.astype(like.dtype) if view is None else step
                for view, step, mean, like in zip(views, steps, out, jax.tree.leaves(updates), strict=True)
            ]
            mixed, rest_state = self._rest().update(structure.unflatten(mixed), state.rest, params, **extra_args)
            momentum = with_value(state.momentum, structure.unflatten(momenta))
            return mixed, DionState(next_count(state.count), momentum, structure.unflatten(factors), rest_state)

    def _view(self, path: tuple[Any, ...], leaf: Like) -> _View | None:
        """Returns the leaf's view as a matrix; `None` if it goes to the optimizer of the rest."""
        shape = leaf.shape
        if len(shape) < 2 or 0 in shape:
            return None
        if not self.is_matrix(jax.tree_util.keystr(path, simple=True, separator="/"), leaf):
            return None
        n, m = math.prod(shape[:-1]), shape[-1]
        # Rounded up, but not for the last bit of a product such as 0.07 * 100.
        rank = self.rank or math.ceil((self.rank_fraction or 0) * min(n, m) * (1 - 1e-12))
        return _View(n, m, min(rank, n, m))

    def _rest(self) -> optax.GradientTransformationExtraArgs:
        def is_other(path, leaf):
            return self._view(path, leaf) is None

        return optax.masked(self.rest, partial(jax.tree_util.tree_map_with_path, is_other))


def _rounds(
    decay: float | int, leaves: list[Array], views: list[_View | None], momenta: list[Any], factors: list[Any]
) -> Generator[Messages, Messages, tuple[list[Array], list[Any], list[Any]]]:
    """Returns directions of matrices and mean gradients of other leaves, new momenta and new factors."""
    groups = _group(leaves, views)
    others = [i for i, view in enumerate(views) if view is None]
    # M_w += g_w, matrices of one shape stacked.
    matrices = [
        jnp.stack([(momenta[i] + leaves[i]).reshape(-1, leaves[i].shape[-1]) for i in members]) for members in groups
    ]
    right = [jnp.stack([factors[i] for i in members]) for members in groups]
    # P = orth(mean(M_w Q))
    received = yield Messages(mean=[jnp.einsum("knm,kmr->knr", m, q) for m, q in zip(matrices, right)])
    left = orthonormal(received.mean)
    # R_wᵀ = Pᵀ M_w rather than M_wᵀ P, for which XLA:CPU would transpose the whole of M.
    local = [jnp.einsum("krn,knm->krm", p, m) for p, m in zip(left, matrices)]
    received = yield Messages(mean=[*local, *(leaves[i] for i in others)])

    out, momenta, factors = list(leaves), list(momenta), list(factors)
    for members, m, p, own, mean, old in zip(groups, matrices, left, local, received.mean, right):
        columns = jnp.swapaxes(p, 1, 2)
        # M_w -= (1-μ) P R_wᵀ, with this worker's own R_w, unlike the paper.
        residual = m - (1 - decay) * outer(columns, own)
        # Q = R with its columns, the rows of Rᵀ here, scaled to length 1
        lengths = jnp.sqrt(jnp.sum(jnp.square(mean), axis=2, keepdims=True))
        unit_rows = mean / (lengths + EPSILON)
        # √(m/n) P Qᵀ
        direction = math.sqrt(m.shape[2] / m.shape[1]) * outer(columns, unit_rows)
        # A column of length zero says nothing about the next gradient, so the previous one is kept.
        q = jnp.swapaxes(jnp.where(lengths > 0, unit_rows, jnp.swapaxes(old, 1, 2)), 1, 2)
        for k, i in enumerate(members):
            out[i], momenta[i] = (x[k].reshape(leaves[i].shape) for x in (direction, residual))
            factors[i] = q[k]
    for i, mean in zip(others, received.mean[len(groups) :], strict=True):
        out[i] = mean
    return out, momenta, factors


def _group(leaves: list[Array], views: list[_View | None]) -> list[list[int]]:
    """Groups matrices of one view and dtype; large ones stay alone, since stacking copies them."""
    matrices = [i for i, view in enumerate(views) if view is not None]

    def kind(i):
        return views[i], leaves[i].dtype, i if leaves[i].size > STACKED_SIZE else None

    return [[matrices[k] for k in members] for members in group_alike(matrices, kind)]
