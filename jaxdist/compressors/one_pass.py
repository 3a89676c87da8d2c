"""Codes of blocks in one pass over the memory of NVIDIA GPUs, and without a padded copy of what is no whole block.

XLA:GPU reads an array once for the scales of its blocks and once more for their codes. A kernel of Pallas runs the same
`compress` on a few blocks at a time, which stay on the chip in between: half the time, and the same
bits, up to the order of sums.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import like_of, triton_parameters
from .._core.jaxprs import apply_primitive, evaluate
from .._core.types import Array, Float, Payload, PRNGKeyArray
from .packing import RUN, bytes_of_codes
from .random import KeyOrStream, Stream, key_words
from .rounding import whole_words

Compress = Callable[[Array, Any], Payload]
# Entries that one program of the kernel codes, or a block where that is more; smaller arrays, and larger blocks, are
# left to XLA.
TILE, LARGEST_BLOCK = 2048, 8192
# With four warps `qsgd(4)` takes 13 % more time on an H100, and `dynamic_fp8()` 5 %.
WARPS = 2
# From so many entries on, an array with a part of a block is coded in two parts: a smaller one is not worth the trace.
MANY = 2**16
WORD = 32


def in_blocks(compress: Compress, block: int, bits: int) -> Compress:
    """Returns `compress` of an array by `in_parts`, and by `in_one_pass` where a kernel can have these codes."""
    # In a kernel arrays have a power of two of words.
    return in_parts(compress if bits == 3 else in_one_pass(compress, block), block, bits)


def in_parts(compress: Compress, block: int, bits: int) -> Compress:
    """Returns `compress` of an array, computed apart for its whole blocks and for what is left.

    XLA:CPU writes out what is padded to whole blocks, in float32, and reads it twice: two or three times the time of a
    code, and four bytes an entry. The conditions are those of `in_one_pass`; a payload has codes of so many `bits`, in
    whole words, and numbers of blocks.
    """
    unit = math.lcm(block, RUN)

    def compress_parts(x: Array, key: KeyOrStream) -> Payload:
        rest = x.size % unit
        whole = x.size - rest
        # The words of a part of a block end in it.
        if x.size < MANY or block % WORD or whole in (0, x.size):
            return compress(x, key)
        left, right, *start = key if isinstance(key, Stream) else key_words(key)
        flat, position = x.reshape(-1), sum(start, jnp.uint32(whole))
        codes, numbers = compress(jnp.pad(flat[whole:], (0, -rest % block)), Stream(left, right, position))
        last = codes[: bytes_of_codes(whole_words(rest, bits), bits)], numbers
        first = compress(flat[:whole], key)
        return first._make(map(jnp.concatenate, zip(first, last, strict=True)))

    return compress_parts


def in_one_pass(compress: Compress, block: int) -> Compress:
    """Returns `compress` of an array, computed tile by tile where that is faster.

    The payload of whole blocks, and of runs of packed codes, must be that of their parts, one after the other, in
    arrays of one dimension; `compress` may draw noise by `uniform_hash` alone.
    """

    def compress_blocks(x: Array, key: KeyOrStream) -> Payload:
        tile = max(TILE, block)
        fits = (
            block & (block - 1) == 0
            and block <= LARGEST_BLOCK
            and x.size % max(block, RUN) == 0
            and tile < x.size < 2**31
        )
        # A trace for a machine that is not there has no kernel for it.
        parameters = triton_parameters(WARPS) if fits else None
        if parameters is None:
            return compress(x, key)
        in_kernel = partial(run_in_kernel, compress, tile, block, parameters=parameters)
        return lax.platform_dependent(x, key, cuda=in_kernel, default=compress)

    return compress_blocks


def run_in_kernel(
    compress: Compress,
    tile: int,
    block: int,
    x: Array,
    key: PRNGKeyArray,
    *,
    parameters: Any = None,
    interpret: bool = False,
) -> Payload:
    """Runs `compress` on `tile` entries at a time, in one kernel with the compiler's `parameters`."""
    from jax.experimental import pallas as pl

    def compress_tile(entries: Array, left: Array, right: Array, first: Array) -> Payload:
        return compress(entries, Stream(left, right, first))

    word = jax.ShapeDtypeStruct((), jnp.uint32)
    part = jax.ShapeDtypeStruct((tile,), x.dtype)
    closed, payload = jax.make_jaxpr(compress_tile, return_shape=True)(part, word, word, word)
    leaves, structure = jax.tree.flatten(payload)

    def kernel(x_ref: Any, words_ref: Any, *out_refs: Any) -> None:
        # The last tile begins early enough to be whole: what it shares with the one before is written twice.
        start = jnp.minimum(pl.program_id(0) * tile, x.size - tile)
        entries = x_ref[pl.ds(start // block, tile // block), :].reshape(-1)
        operands = [entries, words_ref[0], words_ref[1], start.astype(jnp.uint32)]
        for ref, leaf in zip(out_refs, evaluate(closed, _rule, operands), strict=True):
            ref[pl.ds(start // (tile // leaf.size), leaf.size)] = leaf

    blocks = x.reshape(-1, block)
    shapes = [like_of(x, (x.size // (tile // leaf.size),), leaf.dtype) for leaf in leaves]
    call = pl.pallas_call(
        kernel,
        shapes,
        grid=(pl.cdiv(x.size, tile),),
        compiler_params=parameters,
        interpret=interpret,
    )
    return structure.unflatten(call(blocks, jnp.stack(key_words(key))))


def _rule(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """One operation inside the kernel: Pallas for Triton lacks some."""
    name = equation.primitive.name
    if name == "optimization_barrier":  # against what XLA does, which does not see this
        return operands
    if name == "round":
        return [_round_half_even(operands[0])]
    if name == "platform_index":
        platforms = equation.params["platforms"]
        return [next(i for i, names in enumerate(platforms) if names is None or "cuda" in names)]
    if name == "cond" and isinstance(operands[0], int):
        return evaluate(equation.params["branches"][operands[0]], _rule, operands[1:])
    return apply_primitive(equation, operands)


def _round_half_even(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """As `jnp.rint`, except that zeros have no sign."""
    whole = jnp.floor(x)
    rest = x - whole
    # Half of an even number is whole.
    is_odd = 0.5 * whole != jnp.floor(0.5 * whole)
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), whole + 1.0, whole)
