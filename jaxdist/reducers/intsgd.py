"""IntSGD: integers in a scale that follows the steps of the model, added by an all-reduce; no float is sent."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.trees import next_count
from .._core.types import Array, Int, Key, Like, PyTree, Updates
from ..comm.base import Comm
from ..wire.buffers import fuse, stack_by_shape, unstack
from ..wire.codec import step_key
from .integers import check_integer_bits, levels_of_sum, square_in_range, sum_of_integers
from .messages import for_real_numbers, run
from .reducer import NO_EXTRAS, Extras, Reduced, Reducer, Result, init_draws

TINY = 1e-30  # so that a leaf of zeros has a scale


class IntSGDState(NamedTuple):
    """Replicated: key, count, and for each leaf the moving average of `|mean|²`."""

    key: Key[Array, ""]
    count: Int[Array, ""]
    squares: PyTree


@with_description
def intsgd(bits: int = 8, *, beta: float | int = 0.9, scale: float | int = 1.0, seed: int = 0) -> Reducer:
    """Integers in a scale that follows the last means: `q = round(α x)`, `mean = Σ_w q_w / (W α)`, `own = q / α`.

    For a leaf of `d` entries `α = scale · √d / √(2 W r)` with `r = β r + (1-β) |mean|²`: all workers can compute it
    before the step, so only integers are sent. Rounding is stochastic and unbiased; its variance, at most
    `1 / (4 α² W)` per entry, adds up to `|mean|² / (2 scale²)`. Codes are clipped to `±⌊127/W⌋` (8 bits), so that no
    sum can overflow. What is clipped is missing from `own` too: the law is exact, unbiased as long as nothing clips,
    and error feedback around it delivers the rest later. It needs no contraction there: the error of an entry is below
    `1/α` for any input. Integers have no NaN: it is sent as 0, and infinity as the largest code, so check
    for them before (`skip_nonfinite`).

    *On the wire*: one all-reduce of int8 (or int32), `2(W-1)/W · n` (or `4 n`) bytes sent; the first step, without
    statistics, is a mean in the dtype of the updates.

    *State* (replicated): a key, a count, and a float32 for each leaf.

    Args:
      bits: 8 for up to 127 workers, best below 32, where more than 7 levels are left; 32 costs as much as float32 and
        rounds as 8 does.
      beta: the decay of past means. Lower follows the gradient faster, higher clips less often after a small gradient.
      scale: the resolution: higher is more exact, until entries clip. Double it while `⌊127/W⌋` is above four times the
        largest code: 1 is the paper's, cautious for few workers.

    Raises:
      ValueError: an argument is out of range; at trace time, more than 127 workers with 8 bits.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer, x = jd.reducers.intsgd(), jnp.array([2.0, -1.0])
      >>> _, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> round(float(state.squares), 3)
      5.0

    References:
      Mishchenko, Wang, Kovalev, Richtárik, "IntSGD: Adaptive Floatless Compression of Stochastic Gradients",
      arXiv:2102.08374, 2021. `r` follows the reduced gradient, as in the authors' code; in the paper, the parameters.
    """
    check_integer_bits(bits)
    check_range("beta", beta, 0, 1)
    check_range("scale", scale, 0, ends="()")
    reducer = _IntSGD(bits, beta, scale, seed)
    return Reducer(for_real_numbers(reducer.init), reducer.reduce)


class _IntSGD(NamedTuple):
    bits: int
    beta: float | int
    scale: float | int
    seed: int

    def init(self, like: PyTree[Like]) -> IntSGDState:
        return IntSGDState(*init_draws(self.seed), jax.tree.map(lambda x: jnp.zeros((), jnp.float32), like))

    def reduce(self, updates: Updates, state: IntSGDState, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        # Checks the number of workers.
        levels_of_sum(self.bits, comm.size)
        with jax.named_scope("intsgd"):
            # Before the first step there is no mean to take the scale from.
            is_first = state.count == 0
            reduced, squares = comms.cond(is_first, _mean_of_floats, self._mean_of_codes, comm, updates, state)
        return reduced, IntSGDState(state.key, next_count(state.count), squares)

    def _mean_of_codes(self, comm: Comm, updates: Updates, state: IntSGDState) -> tuple[Reduced, PyTree]:
        leaves, tree = jax.tree.flatten(updates)
        groups, stacks = stack_by_shape(leaves)
        squares = jax.tree.leaves(state.squares)
        # α = scale · √d / √(2 W r)
        alphas = []
        for members, stack in zip(groups, stacks, strict=True):
            root = self.scale * math.sqrt(stack[0].size / (2 * comm.size))
            alphas.append(root / jnp.sqrt(jnp.stack([squares[i] for i in members]) + TINY))
        # Rounding errors of workers with different draws average out.
        key = step_key(state.key, state.count, comm, shared=False)
        means, owns = run(sum_of_integers(stacks, alphas, key, comm, self.bits), comm)
        # An empty leaf has nothing that differs, and both branches must have one type.
        own = comm.varying(tree.unflatten(unstack(groups, owns)))
        reduced = Reduced(tree.unflatten(unstack(groups, means)), own)
        # r = β r + (1-β) |mean|²
        beta = self.beta
        return reduced, jax.tree.map(
            lambda r, mean: beta * r + (1 - beta) * square_in_range(mean), state.squares, reduced.mean
        )


def _mean_of_floats(comm: Comm, updates: Updates, state: IntSGDState) -> tuple[Reduced, PyTree]:
    leaves, tree = jax.tree.flatten(updates)
    mean = tree.unflatten(fuse(comm, comm.mean, leaves))
    return Reduced(mean, comm.varying(updates)), jax.tree.map(square_in_range, mean)
