"""The reducer whose quantization levels are fitted to the gradients, which ALQ and AMQ configure."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_count, check_range
from .._core.types import Array, Float, Like, PyTree, Updates
from .._core.xla_quirks import largest_magnitude
from ..comm.base import Comm
from ..compressors.compressor import Compressor
from ..compressors.rounding import check_buckets, powers_below
from ..compressors.scaled import scaled
from ..wire.buffers import concatenate, from_vectors
from .compressed import compressed
from .messages import as_generator, from_generator
from .reducer import DrawState, Extras, Forms, Protocol, Reduced, Reducer, init_draws
from .trees import cast_like

Norm = Literal["max", "l2"]


class AdaptiveState(NamedTuple):
    """Replicated: the key and count of the compressor, and the current levels."""

    codes: DrawState
    levels: Float[Array, " levels"]


class LevelPlan(NamedTuple):
    """How levels are fitted: `fit` of the mean of all workers' `statistics(x)`, for `code(levels)`."""

    name: str
    first: Array
    statistics: Callable[[Array], Array]
    fit: Callable[[Array], Array]
    code: Callable[[Array], Compressor]
    due: Callable[[Array], Array]
    seed: int

    def init(self, like: PyTree[Like]) -> AdaptiveState:
        """Starts with the first levels."""
        # A copy of its own for each state, which may be donated.
        return AdaptiveState(init_draws(self.seed), jnp.array(self.first))

    def messages(self, updates: Updates, state: AdaptiveState, comm: Comm, extras: Extras) -> Protocol:
        """Encodes all leaves as one vector, with levels that are fitted before if that is due."""
        leaves, tree = jax.tree.flatten(updates)
        if not leaves:
            return Reduced(updates, updates), state
        wide = [leaf.astype(jnp.float32) for leaf in leaves]
        flat = concatenate(wide)
        levels = state.levels
        if flat.size:
            due = self.due(state.codes.count)
            levels = comms.cond(due, self._fit_to_workers, lambda comm, flat, levels: levels, comm, flat, levels)
        reducer = compressed(self.code(levels), seed=self.seed)
        reduced, codes = yield from as_generator(reducer, flat, state.codes, comm, extras)
        mean, own = (cast_like(tree.unflatten(from_vectors([part], wide)), updates) for part in reduced)
        return Reduced(mean, own), AdaptiveState(codes, levels)

    def _fit_to_workers(self, comm: Comm, flat: Array, levels: Array) -> Array:
        """Fits the levels to the gradients of all workers; the old ones stay where that fails."""
        # In a unit that all workers share: squares of the norms neither overflow nor vanish, and the fit is the same.
        _, inverse = powers_below(comm.max(largest_magnitude(flat[None])))
        # F is the mean of the workers' distributions, so all of them fit the same levels, bit for bit.
        statistics = comm.mean(self.statistics(flat * inverse[0]))
        new = self.fit(statistics)
        # A histogram, or a row of sums for each normal distribution with its weight first. Zeros have no distribution.
        weights = statistics if statistics.ndim == 1 else statistics[:, 0]
        usable = jnp.isfinite(statistics).all() & (jnp.sum(weights) > 0) & (jnp.diff(new) > 0).all()
        return jnp.where(usable, new, levels)


def check_adaptive(bits: int, bucket: int, norm: str, norm_power: int, block: int) -> None:
    """Checks the arguments that `alq` and `amq` share."""
    if bits not in (2, 3, 4):
        raise ValueError(f"bits must be 2, 3 or 4, got {bits}; 8 bits lose next to nothing without adapting: qsgd(8)")
    check_buckets(bucket, norm)
    if norm_power not in (0, 1, 2):
        raise ValueError(f"norm_power must be 0, 1 or 2, got {norm_power}")
    check_count("block", block, 1)


def fit_steps(update_steps: Sequence[int], every: int) -> Callable[[Array], Array]:
    """Returns the function that says whether levels are fitted after `count` reductions."""
    for step in update_steps:
        check_range("each of update_steps", step, 0, ends="[]")
    check_count("every", every, 1)
    # At step 0, every so many steps, and at the given ones.
    return lambda count: jnp.any(jnp.stack([count % every == 0, *(count == step for step in update_steps)]))


def adaptive(plan: LevelPlan, forms: Forms | None = None) -> Reducer:
    """Makes the reducer that encodes with the levels of a plan and fits them when they are due."""
    if forms is None:
        # Inside error feedback buckets are shrunk by their error with the current levels.
        forms = Forms(contraction=adaptive(plan._replace(code=lambda levels: scaled(plan.code(levels))), Forms()))
    return from_generator(plan.name, plan.init, plan.messages, forms=forms)
