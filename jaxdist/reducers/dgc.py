"""Deep gradient compression: sparse updates, with the momentum accumulated on each worker before they are sent."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.dtypes import widen_like, working_dtype
from .._core.trees import tree_where
from .._core.types import Array, Like, PyTree, Updates
from ..comm.base import Comm
from ..compressors.top_k import Method, top_k
from ..state.marks import PerWorker, with_value
from .compressed import compressed
from .feedback import is_absent, zero_where
from .messages import as_generator, for_real_numbers, from_generator, run
from .reducer import NO_EXTRAS, DrawState, Extras, Protocol, Reduced, Reducer, Result, Use
from .trees import cast_like, tree_norm


class DGCState(NamedTuple):
    """Per worker, in float32 or better: the momentum `u`, and `v`, what was not sent of its sum."""

    reducer: DrawState
    momentum: PerWorker
    unsent: PerWorker


@with_description
def dgc(
    density: float,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip_norm: float | int | None = None,
    masking: bool = True,
    warmup_densities: Sequence[float] = (),
    warmup_steps: int = 0,
    method: Method = "threshold",
) -> Reducer:
    """Sends the largest entries of an accumulated momentum, and what was not sent waits with its momentum.

    On each worker, for every leaf: `u = m u + g`, `v = v + u` (Nesterov: `u = m (u + g)`, `v = v + u + g`); sent is
    `own = top_k(v)`, and where something was sent `v = 0` and, with masking, `u = 0`. The optimizer behind it is plain
    SGD: the momentum is here, where entries that wait for many steps do not lose theirs.

    *On the wire*: what `compressed(top_k(density))` sends: one all-gather, `(W-1)` payloads. During the warm-up that of
    the density of the step; the program holds them all.

    *State*: that of `compressed`, and per worker u and v, each of the size of the updates. The law is exact. Error
    feedback around it is refused, since it remembers what it did not send.

    Args:
      density: the part of each leaf that is sent. 0.001 with a warm-up is the paper's; start at 0.01. Leaves of a few
        entries (biases) lose more than they save: give them to `exact` by `per_leaf`.
      momentum: m, as for SGD.
      clip_norm: the norm at which each worker clips its gradient, all leaves together, is this divided by `sqrt(W)`;
        `None`: no clipping.
      masking: entries that were sent lose their momentum, which would go on in a stale direction.
      warmup_densities: in falling order, each for its part of the warm-up; the paper has 0.25, 0.0625, 0.0156, 0.004.
      warmup_steps: of all of them together; four or five epochs.
      method: as in `top_k`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.dgc(0.5, momentum=0.5)
      >>> state, x = reducer.init(jnp.zeros(2)), jnp.array([1.0, 3.0])
      >>> reduced, state = jax.jit(lambda x, state: reducer.reduce(x, state, jd.comm.alone()))(x, state)
      >>> reduced.mean.tolist(), state.momentum.value.tolist(), state.unsent.value.tolist()
      ([0.0, 3.0], [1.0, 0.0], [1.0, 0.0])

    References:
      Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
      Training", arXiv:1712.01887, 2017.
    """
    check_range("momentum", momentum, 0, 1)
    if clip_norm is not None:
        check_range("clip_norm", clip_norm, 0, ends="(]")
    if bool(warmup_densities) != (warmup_steps > 0):
        raise ValueError(
            "a warm-up needs both warmup_densities and warmup_steps, got "
            f"warmup_densities={warmup_densities} and warmup_steps={warmup_steps}"
        )
    if warmup_steps and warmup_steps < len(warmup_densities):
        raise ValueError(f"warmup_steps must be at least 1 for each warm-up density, got {warmup_steps}")
    densities = [*warmup_densities, density]
    if densities != sorted(densities, reverse=True):
        raise ValueError(f"warmup_densities must fall, to density={density} at last, got {list(warmup_densities)}")
    stages = [compressed(top_k(part, method=method)) for part in densities]
    ends = [warmup_steps * (i + 1) // len(warmup_densities) for i in range(len(warmup_densities))]
    reducer = _DGC(stages, ends, momentum, nesterov, clip_norm, masking)
    limits = {Use.FEEDBACK: "dgc keeps what it does not send, with its momentum; use it without error feedback"}
    if clip_norm is not None:
        limits[Use.PARTS] = "dgc clips by the norm of all leaves; leave clip_norm= out"
    if not warmup_steps:
        return from_generator("dgc", reducer.init, partial(reducer.messages, stages[0]), limits=limits)
    return Reducer(for_real_numbers(reducer.init), reducer.reduce, limits=limits)


class _DGC(NamedTuple):
    """`stages`: the reducers of the warm-up and the last one; `ends`: the steps at which those of the warm-up end."""

    stages: list[Reducer]
    ends: list[int]
    momentum: float
    nesterov: bool
    clip_norm: float | int | None
    masking: bool

    def init(self, like: PyTree[Like]) -> DGCState:
        # Separate buffers: states may be donated.
        u, v = (jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, working_dtype(leaf.dtype)), like) for _ in range(2))
        return DGCState(self.stages[0].init(jax.tree.map(widen_like, like)), PerWorker(u), PerWorker(v))

    def messages(
        self, stage: Reducer, updates: Updates, state: DGCState, comm: Comm, extras: Extras = NO_EXTRAS
    ) -> Protocol:
        u, v = self._accumulate(updates, state, comm)
        absent = is_absent(extras)
        v = zero_where(absent, v)
        reduced, inner = yield from as_generator(stage, v, state.reducer, comm, extras)
        # v = v - own: what was sent is v itself, bit for bit, so the difference is zero there.
        v = jax.tree.map(jnp.subtract, v, reduced.own)
        if self.masking:
            # An entry of zero counts as not sent.
            u = jax.tree.map(lambda u, own: jnp.where(own != 0, 0.0, u), u, reduced.own)
        if absent is not None:
            # A worker that takes no part keeps both as they are.
            u, v = (tree_where(absent, old.value, new) for old, new in ((state.momentum, u), (state.unsent, v)))
        state = DGCState(inner, with_value(state.momentum, u), with_value(state.unsent, v))
        return Reduced(cast_like(reduced.mean, updates), reduced.own), state

    def _accumulate(self, updates: Updates, state: DGCState, comm: Comm) -> tuple[Updates, Updates]:
        """The momentum `u` and the unsent sum `v` with the gradient of this step."""
        m, u, v = self.momentum, state.momentum.value, state.unsent.value
        gradients = jax.tree.map(lambda x, u: x.astype(u.dtype), updates, u)
        if self.clip_norm is not None:
            # Each worker clips by 1/√W of the norm: independent gradients of W workers add up to it.
            gradients = _clip(gradients, self.clip_norm / math.sqrt(comm.size))
        if self.nesterov:
            # u = m (u + g), v = v + u + g
            u = jax.tree.map(lambda u, g: m * (u + g), u, gradients)
            return u, jax.tree.map(lambda v, u, g: v + u + g, v, u, gradients)
        # u = m u + g, v = v + u
        u = jax.tree.map(lambda u, g: m * u + g, u, gradients)
        return u, jax.tree.map(jnp.add, v, u)

    def reduce(self, updates: Updates, state: DGCState, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        with jax.named_scope("dgc"):
            return self._reduce_from(extras, 0, comm, updates, state)

    def _reduce_from(self, extras: Extras, number: int, comm: Comm, updates: Updates, state: DGCState) -> Result:
        """Reduces with the stage that is due, one from this number on."""

        def reduce_now(comm, updates, state):
            return run(self.messages(self.stages[number], updates, state, comm, extras), comm)

        if number == len(self.ends):
            return reduce_now(comm, updates, state)
        # A payload has a static size, so every density of the warm-up is a branch of the program.
        is_due = state.reducer.count < self.ends[number]
        return comms.cond(is_due, reduce_now, partial(self._reduce_from, extras, number + 1), comm, updates, state)


def _clip(gradients: PyTree, norm: float) -> PyTree:
    """Scales gradients down to this norm, of all leaves together, if theirs is larger."""

    def scale(tree: PyTree, factor: Array) -> PyTree:
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)

    # In two factors: a norm near the largest number overflows, and a quotient by it vanishes.
    shift = jnp.where(tree_norm(gradients) > 2.0**100, 2.0**-24, 1.0)
    gradients = scale(gradients, shift)
    length = tree_norm(gradients)
    return scale(gradients, jnp.minimum(1 / shift, norm / jnp.where(length == 0, 1.0, length)))
