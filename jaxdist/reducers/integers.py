"""Sums of integers that fit into a word however many workers add them."""

from collections.abc import Generator

import jax
import jax.numpy as jnp

from .._core.dtypes import narrow, working_dtype
from .._core.types import Array, Float, Key
from ..comm.base import Comm
from ..compressors.random import uniform_hash
from .reducer import Messages

WORDS = {8: jnp.int8, 32: jnp.int32}
LARGEST_SQUARE = 1e38  # so that a mean beyond 1e19 leaves a scale


def check_integer_bits(bits: int) -> None:
    """Checks that `bits` is 8 or 32."""
    if bits not in WORDS:
        raise ValueError(f"bits must be 8 or 32, got {bits}")


def levels_of_sum(bits: int, workers: int) -> int:
    """The largest integer that one worker may send."""
    # The sum of all workers' codes fits the word, and float32 holds a code exactly.
    levels = min((2 ** (bits - 1) - 1) // workers, 2**24)
    if levels < 1:
        raise ValueError(f"{bits} bits leave no level for a sum over {workers} workers: use bits=32")
    return levels


def square_in_range(x: Array) -> Array:
    """The squared norm, below infinity."""
    return jnp.minimum(jnp.sum(jnp.square(x.astype(jnp.float32))), LARGEST_SQUARE)


def sum_of_integers(
    stacks: list[Array], alphas: list[Float[Array, " _"]], key: Key[Array, ""], comm: Comm, bits: int
) -> Generator[Messages, Messages, tuple[list[Array], list[Array]]]:
    """Sends stacks of `k` leaves with a scale for each; returns the means and this worker's contributions."""
    levels = levels_of_sum(bits, comm.size)
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
