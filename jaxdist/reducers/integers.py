"""IntSGD: integers in a scale that all workers share, which an all-reduce adds up; no float is sent."""

import math
from collections.abc import Generator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.dtypes import narrow, working_dtype
from .._core.trees import next_count
from .._core.types import Array, Float, Int, Key, Like, PyTree, Updates
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm
from ..compressors.random import uniform_hash
from ..wire.flat import fuse, stack_by_shape, step_key, unstack
from .base import (
    NO_EXTRAS,
    DrawState,
    Extras,
    Messages,
    Protocol,
    Reduced,
    Reducer,
    Result,
    for_real_numbers,
    from_generator,
    init_draws,
    run,
)

WORDS = {8: jnp.int8, 32: jnp.int32}
TINY = 1e-30  # so that a leaf of zeros has a scale
LARGEST_SQUARE = 1e38  # so that a mean beyond 1e19 leaves a scale


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
    _check_bits(bits)
    check_range("beta", beta, 0, 1)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    cfg = _Config(bits, beta, scale, seed)
    return Reducer(for_real_numbers(partial(_init_intsgd, cfg)), partial(_reduce_intsgd, cfg))


class _Config(NamedTuple):
    bits: int
    beta: float | int
    scale: float | int
    seed: int


def _init_intsgd(cfg: _Config, like: PyTree[Like]) -> IntSGDState:
    return IntSGDState(*init_draws(cfg.seed), jax.tree.map(lambda x: jnp.zeros((), jnp.float32), like))


def _reduce_intsgd(
    cfg: _Config, updates: Updates, state: IntSGDState, comm: Comm, extras: Extras = NO_EXTRAS
) -> Result:
    # Checks the number of workers.
    _levels(cfg.bits, comm.size)
    with jax.named_scope("intsgd"):
        # Before the first step there is no mean to take the scale from.
        is_first = state.count == 0
        reduced, squares = comms.cond(is_first, _mean_of_floats, partial(_mean_of_codes, cfg), comm, updates, state)
    return reduced, IntSGDState(state.key, next_count(state.count), squares)


def _mean_of_floats(comm: Comm, updates: Updates, state: IntSGDState) -> tuple[Reduced, PyTree]:
    leaves, tree = jax.tree.flatten(updates)
    mean = tree.unflatten(fuse(comm, comm.mean, leaves))
    return Reduced(mean, comm.varying(updates)), jax.tree.map(_square, mean)


def _mean_of_codes(cfg: _Config, comm: Comm, updates: Updates, state: IntSGDState) -> tuple[Reduced, PyTree]:
    leaves, tree = jax.tree.flatten(updates)
    groups, stacks = stack_by_shape(leaves)
    squares = jax.tree.leaves(state.squares)
    # α = scale · √d / √(2 W r)
    alphas = []
    for members, stack in zip(groups, stacks, strict=True):
        root = cfg.scale * math.sqrt(stack[0].size / (2 * comm.size))
        alphas.append(root / jnp.sqrt(jnp.stack([squares[i] for i in members]) + TINY))
    # Rounding errors of workers with different draws average out.
    key = step_key(state.key, state.count, comm, shared=False)
    means, owns = run(_sum_of_integers(stacks, alphas, key, comm, cfg.bits), comm)
    # An empty leaf has nothing that differs, and both branches must have one type.
    own = comm.varying(tree.unflatten(unstack(groups, owns)))
    reduced = Reduced(tree.unflatten(unstack(groups, means)), own)
    # r = β r + (1-β) |mean|²
    beta = cfg.beta
    return reduced, jax.tree.map(lambda r, mean: beta * r + (1 - beta) * _square(mean), state.squares, reduced.mean)


@with_description
def integer_sum(bits: int = 8, *, seed: int = 0) -> Reducer:
    """Integers in the scale of the largest entry of all: `α = L / max_w |x_w|∞`, `q = round(α x)`, as in `intsgd`.

    With `L = ⌊127/W⌋` (8 bits) nothing is ever clipped and no sum overflows; rounding is stochastic and unbiased, with
    an error below `max / L` per entry. The price is another round for the largest entries. Inside error feedback errors
    stay bounded for `L` of two and more, up to 63 workers.

    *On the wire*: an all-reduce of one float32 for each leaf, then one of `n` bytes as int8 (or `4 n` as int32);
    `2(W-1)/W` of both sent.

    *State* (replicated): a key and a count.

    Args:
      bits: 8 for up to 127 workers (31 levels at 4 workers, 15 at 8, 7 at 16); 32 costs as much as float32 and is
        nearly exact.

    Raises:
      ValueError: `bits` is neither 8 nor 32; at trace time, more than 127 workers with 8 bits.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.integer_sum()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([[63.0, 2.0], [-61.0, 4.0]]))[0].tolist()
      [1.0, 3.0]

    References:
      Mishchenko et al., arXiv:2102.08374, 2021 (its baseline with a shared maximum).
    """
    _check_bits(bits)
    return from_generator("integer_sum", partial(init_draws, seed), partial(_integer_messages, bits))


def _integer_messages(bits: int, updates: Updates, state: DrawState, comm: Comm, extras: Extras) -> Protocol:
    levels = _levels(bits, comm.size)
    leaves, tree = jax.tree.flatten(updates)
    groups, stacks = stack_by_shape(leaves)
    # α = L / max_w |x_w|∞: the largest entry of all workers becomes the largest code.
    received = yield Messages(max=[_largest(stack) for stack in stacks])
    # At most so large that 1 / (α W), by which XLA multiplies, is a normal number.
    limit = 0.5 / (jnp.finfo(jnp.float32).tiny * comm.size)
    alphas = [jnp.minimum(levels / jnp.where(top == 0, 1, top), limit) for top in received.max]
    key = step_key(state.key, state.count, comm, shared=False)
    means, owns = yield from _sum_of_integers(stacks, alphas, key, comm, bits)
    reduced = Reduced(tree.unflatten(unstack(groups, means)), tree.unflatten(unstack(groups, owns)))
    return reduced, DrawState(state.key, next_count(state.count))


def _check_bits(bits: int) -> None:
    if bits not in WORDS:
        raise ValueError(f"bits must be 8 or 32, got {bits}")


def _levels(bits: int, workers: int) -> int:
    # The sum of all workers' codes fits the word, and float32 holds a code exactly.
    levels = min((2 ** (bits - 1) - 1) // workers, 2**24)
    if levels < 1:
        raise ValueError(f"{bits} bits leave no level for a sum over {workers} workers: use bits=32")
    return levels


def _square(x: Array) -> Array:
    return jnp.minimum(jnp.sum(jnp.square(x.astype(jnp.float32))), LARGEST_SQUARE)


def _largest(stack: Array) -> Float[Array, " k"]:
    """The largest magnitude of each of `k` leaves."""
    return largest_entry(jnp.abs(stack).astype(jnp.float32), range(1, stack.ndim), initial=0)


def _sum_of_integers(
    stacks: list[Array], alphas: list[Float[Array, " _"]], key: Key[Array, ""], comm: Comm, bits: int
) -> Generator[Messages, Messages, tuple[list[Array], list[Array]]]:
    """Sends stacks of `k` leaves with a scale for each; returns the means and this worker's contributions."""
    levels = _levels(bits, comm.size)
    # Scales as [k, 1, ...], in the dtype of the arithmetic.
    alphas = [
        alpha.reshape(-1, *(1,) * (stack.ndim - 1)).astype(working_dtype(stack.dtype))
        for alpha, stack in zip(alphas, stacks, strict=True)
    ]
    codes = []
    for i, (stack, alpha) in enumerate(zip(stacks, alphas, strict=True)):
        noise = uniform_hash(jax.random.fold_in(key, i), stack.shape).astype(alpha.dtype)
        # q = ⌊α x + u⌋ with u uniform in [0, 1), which is α x on average; NaN has no code.
        rounded = jnp.floor(stack.astype(alpha.dtype) * alpha + noise)
        clipped = jnp.where(jnp.isnan(rounded), 0, jnp.clip(rounded, -levels, levels))
        codes.append(clipped.astype(WORDS[bits]))
    received = yield Messages(sum=codes)

    def decode(code, alpha, stack):
        return narrow(code.astype(jnp.int32).astype(alpha.dtype) / alpha, stack.dtype)

    # mean = Σ_w q_w / (W α), own = q / α
    means = [decode(code, alpha * comm.size, x) for code, alpha, x in zip(received.sum, alphas, stacks, strict=True)]
    return means, [decode(*parts) for parts in zip(codes, alphas, stacks, strict=True)]
