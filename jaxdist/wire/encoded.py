"""Helpers of compressed methods: keys, decoding of payloads, the contraction for error feedback, ordering."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Int, Key, Payload, PyTree, Updates
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..compressors.combinators import scaled

NO_CONTRACTION = (
    "error feedback needs a contraction, and this compressor states neither its contraction δ nor its variance ω: "
    "give the Compressor one of them, or use it without feedback"
)


def step_key(key: Key[Array, ""], count: Int[Array, ""], comm: Comm, *, shared: bool) -> Key[Array, ""]:
    """The key of this step; different on each worker unless it is `shared`."""
    # The order of all keys in the library: the count of steps, the worker, the leaf.
    key = jax.random.fold_in(key, count)
    return key if shared else jax.random.fold_in(key, comm.index)


def contraction_form(compressor: Compressor) -> Compressor:
    """The compressor to use inside error feedback: itself, or an unbiased one scaled by `1/(1+ω)`."""
    if compressor.contraction is not None:
        return compressor
    # With `E|C(x) - x|² <= ω|x|²`, `C(x) / (1 + ω)` is a contraction with `δ = 1 / (1 + ω)`.
    if compressor.variance is not None:
        return scaled(compressor)
    raise ValueError(NO_CONTRACTION)


def decode_mean(decode: Callable[[Payload], Array], payloads: Payload) -> Array:
    """Averages decoded payloads `[W, ...]`, one worker after the other: one accumulator, not `W` decoded copies."""
    first, rest = jax.tree.map(lambda x: x[0], payloads), jax.tree.map(lambda x: x[1:], payloads)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    total = decode(first)
    if workers > 1:
        total, _ = lax.scan(lambda total, payload: (total + decode(payload), None), total, rest)
    return total / workers


def after(updates: Updates, previous: PyTree) -> Updates:
    """Makes `updates` depend on every array of `previous`, without changing a bit.

    Compilers merge independent collectives, and XLA:CPU removes optimization barriers before it does so. This is a real
    dependence: on a comparison that always holds, NaN or not, and that no compiler folds.
    """
    numbers = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(previous) if leaf.size]
    if not numbers:
        return updates
    there = jnp.array(True)
    for number in numbers:
        there &= (number <= 0) | (number > 0) | (number != number)
    return jax.tree.map(lambda x: jnp.where(there, x, jnp.zeros_like(x)), updates)
