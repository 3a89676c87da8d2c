"""DeMo: decoupled momentum, of which each worker sends only the strongest frequencies."""

import itertools
import math
from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import DTypeLike

from .._core.checks import check_count, check_range
from .._core.dtypes import saturate
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Float, Int, Like, Shape, State, UInt, Updates
from ..compressors.packing import pack, unpack
from ..reducers.messages import run
from ..reducers.reducer import Messages
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import LearningRate, descend, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, local_gradients
from ..wire.buffers import group_alike


class DemoState(NamedTuple):
    """Per worker: the momentum in float32 or better, which contains what was not sent yet."""

    count: Int[Array, ""]
    momentum: PerWorker

    communicates = True


class _Strongest(NamedTuple):
    """The payload: the selected frequencies of each tile and their positions, packed."""

    values: Float[Array, "tiles k"]
    positions: UInt[Array, "tiles bytes"]


def demo(
    learning_rate: LearningRate,
    *,
    decay: float | int = 0.999,
    chunk: int = 64,
    k: int = 32,
    weight_decay: float | int = 0.0,
    values: DTypeLike | None = jnp.bfloat16,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Sends the strongest frequencies of each worker's momentum `m_w = β m_w + η g_w`, and removes them from it.

    Leaves are split into tiles, and each tile is transformed, `c_w = DCT(m_w)`. Worker `w` sends the `k` largest
    entries `q_w` of each tile, `m_w -= DCTᵀ(q_w)`. `C` is for each frequency the mean of `q_w` over the workers *that
    sent it*, and `x -= η (sign(DCTᵀ(C)) + λ x)`. The momentum is its own error feedback, rounding of the values
    included.

    *On the wire* for a leaf of `n` entries in tiles of `t`: one all-gather, `(W-1) · n/t · (k·v + ⌈k·b/8⌉)` bytes
    sent, with `v` bytes for a value and `b = ⌈log₂ t⌉` bits (at least one) for a position, `k` at most `t`. By
    default that is 0.22 bits a parameter, which every worker receives from every other.

    *State*: per worker the momentum in float32 or better. It replaces `all_reduce` and the optimizer: nothing else may
    reduce gradients or add momentum. The updates contain the learning rate, and `update` takes `examples=` and
    `active=`.

    Args:
      learning_rate: `η`, a number or a schedule. As for signSGD, a small fraction of SGD's; start at 1e-3.
      decay: `β`. A lower one forgets unsent momentum sooner: try 0.9 when there are few steps.
      chunk: the largest side of a tile, at most 256. Sides divide the leaf's rows and columns (all dimensions but the
        last, and the last), so a prime number of columns makes tiles one entry wide, which compress little.
      k: the number of frequencies sent of each tile. More follows the gradient better and costs proportionally more.
      weight_decay: `λ`, decoupled.
      values: the dtype of sent frequencies; `None`: that of the momentum.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.optimizers.demo(0.5, k=1, axis=None)
      >>> params = jnp.zeros((2, 2))
      >>> updates, state = jax.jit(tx.update)(jnp.array([[3.0, 1.0], [3.0, 1.0]]), tx.init(params), params)
      >>> updates.tolist()  # the strongest frequency is the mean, and the rest stays in the momentum
      [[-0.5, -0.5], [-0.5, -0.5]]
      >>> state.momentum.value.round(2).tolist()
      [[0.5, -0.5], [0.5, -0.5]]

    References:
      Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, 2024.
    """
    check_range("decay", decay, 0, 1)
    check_count("chunk", chunk, 1)
    check_count("k", k, 1)
    if chunk > 256:
        raise ValueError(f"chunk must be at most 256, got {chunk}")
    check_range("weight_decay", weight_decay, 0)
    if values is not None and not jnp.issubdtype(values, jnp.floating):
        raise ValueError(f"values must be a floating dtype, such as bfloat16, got {jnp.dtype(values)}")

    def init_fn(params) -> State:
        check_leaves(params)
        return DemoState(jnp.zeros((), jnp.int32), bind(PerWorker(zeros_like(params)), axis))

    def update_fn(updates, state, params=None, *, examples=None, active=None, **extra_args) -> tuple[Updates, State]:
        del extra_args
        with jax.named_scope("demo"):
            gradients, comm = local_gradients(updates, axis, examples, active, name="demo")
            rate = rate_at(learning_rate, state.count)
            # m_w = β m_w + η g_w
            momentum = jax.tree.map(lambda m, g: decay * m + rate.astype(m.dtype) * g, state.momentum.value, gradients)
            leaves, structure = jax.tree.flatten(momentum)
            # C and q_w, transformed back: DCTᵀ(C) and DCTᵀ(q_w)
            means, sent = run(_rounds(leaves, chunk, k, values), comm)
            # m_w -= DCTᵀ(q_w): the momentum is its own error feedback.
            residual = with_value(state.momentum, structure.unflatten([m - s for m, s in zip(leaves, sent)]))
            # x -= η (sign(DCTᵀ(C)) + λ x)
            direction = jax.tree.map(jnp.sign, structure.unflatten(means))
            out = descend(direction, rate, weight_decay, params, updates)
            return out, DemoState(next_count(state.count), residual)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _rounds(
    leaves: list[Array], chunk: int, k: int, values: DTypeLike | None
) -> Generator[Messages, Messages, tuple[list[Array], list[Array]]]:
    """Returns for each leaf the mean over the workers that sent a frequency, and what this worker sent."""
    means, sent = list(leaves), list(leaves)
    tiles = [tile_of(leaf.shape, chunk) for leaf in leaves]
    # Tiles of equal shape are encoded together, whichever leaf they are from: one program for each shape of tile.
    groups = group_alike(range(len(leaves)), lambda i: (tiles[i], leaves[i].dtype))
    stacks = [jnp.concatenate([to_frequencies(leaves[i], tiles[i]) for i in members]) for members in groups]
    payloads = [_select(stack, k, values) for stack in stacks]
    arrays, structure = jax.tree.flatten(payloads)
    received = yield Messages(gather=arrays)
    gathered = structure.unflatten(received.gather)
    for members, stack, payload, arrived in zip(groups, stacks, payloads, gathered, strict=True):
        own, mean = _scatter(payload, stack), _mean_of_senders(arrived, stack)
        ends = list(itertools.accumulate(leaves[i].size // math.prod(tiles[i]) for i in members))
        for i, start, end in zip(members, [0, *ends], ends):
            sent[i] = from_frequencies(own[start:end], tiles[i], leaves[i])
            means[i] = from_frequencies(mean[start:end], tiles[i], leaves[i])
    return means, sent


def _select(frequencies: Float[Array, "tiles size"], k: int, values: DTypeLike | None) -> _Strongest:
    """Encodes the `k` largest frequencies of each tile."""
    size = frequencies.shape[1]
    # In float32: on CPU, top_k is ten times slower for any other dtype.
    _, positions = lax.top_k(jnp.abs(frequencies.astype(jnp.float32)), min(k, size))
    kept = jnp.take_along_axis(frequencies, positions, axis=1, mode="promise_in_bounds")
    # ⌈log₂ size⌉ bits for a position
    bits = _position_bits(size)
    words = pack(positions.astype(jnp.uint8 if bits <= 8 else jnp.uint16), bits)
    if values is not None:
        # What a narrow range cuts off stays in the momentum.
        kept = saturate(kept, values, jnp.isfinite(kept))
    return _Strongest(kept, words)


def _position_bits(size: int) -> int:
    return max(1, (size - 1).bit_length())


def _scatter(payload: _Strongest, like: Float[Array, "tiles size"]) -> Float[Array, "tiles size"]:
    """Decodes a payload: the sent frequencies at their positions, zeros elsewhere."""
    size = like.shape[1]
    positions = unpack(payload.positions, _position_bits(size), payload.values.shape[1]).astype(jnp.int32)

    def scatter_tile(values, positions):
        zeros = jnp.zeros(size, like.dtype)
        return zeros.at[positions].set(values, mode="promise_in_bounds", unique_indices=True)

    return jax.vmap(scatter_tile)(payload.values.astype(like.dtype), positions)


def _mean_of_senders(payloads: _Strongest, like: Float[Array, "tiles size"]) -> Float[Array, "tiles size"]:
    """Returns the mean of each frequency over the workers that sent it; zero if none did."""

    def sum_and_count(payload):
        # Decoding ones in place of the values marks the senders of each frequency.
        ones = payload._replace(values=jnp.ones_like(payload.values))
        return _scatter(payload, like), _scatter(ones, like)

    def add(carry, payload):
        return jax.tree.map(jnp.add, carry, sum_and_count(payload)), None

    # Payloads are added in the order of the workers, so that the rounding is the same on all of them and in every run.
    first, rest = (jax.tree.map(lambda x, part=part: x[part], payloads) for part in (0, slice(1, None)))
    (total, senders), _ = lax.scan(add, sum_and_count(first), rest)
    return total / jnp.maximum(senders, 1)


def tile_of(shape: Shape, chunk: int) -> tuple[int, int]:
    """Returns height and width of a leaf's tiles: the largest divisors up to `chunk` of its rows and of its columns.

    Rows are all dimensions but the last one; a vector is a single row: `[3, 3, 16, 50]` has tiles of 48 by 50.
    """
    rows, columns = _matrix(shape)
    return _largest_divisor(rows, chunk), _largest_divisor(columns, chunk)


def to_frequencies(x: Array, tile: tuple[int, int]) -> Float[Array, "tiles size"]:
    """Returns the orthonormal cosine transforms (DCT-II) of all tiles of a leaf, one in each row."""
    (rows, columns), (height, width) = _matrix(x.shape), tile
    # Indices: tile row a, row h in the tile, tile column b, column w in the tile; frequencies i and j.
    blocks = x.reshape(rows // height, height, columns // width, width)
    vertical, horizontal = _cosines(height, x), _cosines(width, x)
    out = jnp.einsum("ahbw,ih,jw->abij", blocks, vertical, horizontal, precision=lax.Precision.HIGHEST)
    return out.reshape(rows // height * (columns // width), height * width)


def from_frequencies(frequencies: Float[Array, "tiles size"], tile: tuple[int, int], like: Like) -> Array:
    """Inverts `to_frequencies`: returns a leaf in the shape of `like`."""
    (rows, columns), (height, width) = _matrix(like.shape), tile
    blocks = frequencies.reshape(rows // height, columns // width, height, width)
    vertical, horizontal = _cosines(height, frequencies), _cosines(width, frequencies)
    out = jnp.einsum("abij,ih,jw->ahbw", blocks, vertical, horizontal, precision=lax.Precision.HIGHEST)
    return out.reshape(like.shape)


def _matrix(shape: Shape) -> tuple[int, int]:
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _largest_divisor(length: int, limit: int) -> int:
    return max((d for d in range(1, min(length, limit) + 1) if length % d == 0), default=1)


def _cosines(size: int, like: Array) -> Array:
    """`[size, size]`: row `k` is `√(2/n) cos(π k (2i+1) / 2n)`, the first one divided by √2."""
    k, i = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * k * (2 * i + 1) / (2 * size))
    matrix[0] /= np.sqrt(2)
    return jnp.asarray(matrix, like.dtype)
