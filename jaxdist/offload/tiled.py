"""Linear layers of any width, computed in tiles: only one tile of the weights is gathered at a time.

Memory-centric tiling of ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, AxisNames, PyTree, Shape
from ..comm.over import over
from ..state.marks import OnHost, Sharded, is_mark


@jax.tree_util.register_pytree_with_keys_class
class Tiled:
    """A kernel `[n, m]` as a grid of equal tiles, each a separate leaf; made by `tile`.

    `tiles` are `in_splits` rows of `out_splits` tiles, `[⌈n/in_splits⌉, ⌈m/out_splits⌉]` each, or a mark around one;
    entries of the last tiles beyond `shape`, `(n, m)`, are zero and stay zero.
    """

    __slots__ = ("shape", "tiles")

    def __init__(self, tiles: Any, *, shape: Shape):
        self.tiles, self.shape = tiles, tuple(shape)

    def tree_flatten_with_keys(self):
        """Returns the grid as the only child, and the shape."""
        return ((jax.tree_util.GetAttrKey("tiles"), self.tiles),), self.shape

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse of `tree_flatten_with_keys`."""
        return cls(children[0], shape=aux)

    def __repr__(self) -> str:
        return f"Tiled({self.tiles!r}, shape={self.shape})"


def tile(kernel: Any, *, in_splits: int = 1, out_splits: int = 1) -> Tiled:
    """Cuts a kernel into a grid of tiles, padded with zeros to equal sizes.

    Args:
      kernel: `[n, m]`, as `flax.linen.Dense` has it: `y = x @ kernel`.
      in_splits: the number of pieces of the `n` inputs. The results of these tiles are added, in float32 or better.
      out_splits: the number of pieces of the `m` outputs.

    Returns:
      The tiles, for a tree of parameters. `zero.shard(tiles)` shards each over the workers (ZeRO stage 3): the layer
      then gathers tile by tile, and its largest whole array is a tile. Use enough tiles for one to fit; each costs a
      collective.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import offload
      >>> offload.tile(jnp.ones((4, 7)), in_splits=2, out_splits=2).tiles[1][1].tolist()
      [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    """
    if len(kernel.shape) != 2:
        raise ValueError(f"tile needs a kernel [n, m], got shape {tuple(kernel.shape)}")
    for name, splits, length in zip(("in_splits", "out_splits"), (in_splits, out_splits), kernel.shape, strict=True):
        if not 1 <= splits <= max(length, 1):
            raise ValueError(f"{name} must be between 1 and the {length} entries to split, got {splits}")
    rows, columns = -(-kernel.shape[0] // in_splits), -(-kernel.shape[1] // out_splits)
    missing = (rows * in_splits - kernel.shape[0], columns * out_splits - kernel.shape[1])
    if any(missing):
        kernel = jnp.pad(kernel, tuple((0, count) for count in missing))
    cut = [jnp.split(row, out_splits, axis=1) for row in jnp.split(kernel, in_splits, axis=0)]
    return Tiled(cut, shape=(kernel.shape[0] - missing[0], kernel.shape[1] - missing[1]))


def tiled_dense(
    x: Array,
    kernel: Any,
    bias: Any = None,
    *,
    in_splits: int = 1,
    out_splits: int = 1,
    axis: AxisNames = "data",
    remat: bool = True,
) -> Array:
    """Computes `x @ kernel + bias` tile by tile; of sharded or offloaded kernels only one tile is on the device.

    `y[..., k] = Σ_j x[..., j] W_jk`: a loop over `k` and in it one over `j`. A `Sharded` tile is gathered and an
    `OnHost` one copied to the device, inside the loop and again in the backward pass, whose gradient for a sharded tile
    is the mean over workers by a reduce-scatter, as in `zero.gathered`.

    If the whole kernel is on the device anyway, tiles save nothing: the loop needs them stacked, which is a copy, and a
    matrix product has no temporary arrays to shrink. `tiled_mlp` does save memory then.

    *On the wire* for `Sharded` tiles of `n` entries in total, float32: two gathers and a reduce-scatter for each tile,
    together `3(W-1)/W · 4n` bytes sent (without `remat` one gather less). None otherwise.

    *Memory*: one tile with its gradient, and a copy of this worker's shards of all tiles, stacked for the loop.

    Args:
      x: `[..., n]`.
      kernel: the result of `tile`, as it is or with its tiles marked (`zero.shard`); or a plain `[n, m]`.
      bias: `[m]` or `None`; may be `Sharded`.
      in_splits: for a plain kernel, as in `tile`.
      out_splits: likewise.
      axis: the mesh axis over which tiles are `Sharded`.
      remat: fetch each tile again in the backward pass. Without it all are kept from the forward to the backward pass.

    Returns:
      `[..., m]`, in the dtype of the product of `x` and a tile.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import offload
      >>> offload.tiled_dense(jnp.ones((2, 4)), jnp.ones((4, 6)), jnp.ones(6), out_splits=3)[0].tolist()
      [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    grid = _grid("tiled_dense", kernel, in_splits, out_splits)
    return _multiply_grid(x, grid, bias, axis=axis, remat=remat, multiply=_multiply)


def _multiply_grid(
    x: Array, grid: Tiled, bias: Any, *, axis: AxisNames, remat: bool, multiply: Callable[[Array, Array], Array]
) -> Array:
    """`x @ grid + bias`, where `multiply` is the product with one tile."""
    parts = [_input_columns(x, grid, j) for j in range(len(grid.tiles))]
    column = partial(_multiply_column, axis, remat, multiply, x, parts)
    # The scan runs over columns of tiles: each gives other columns of `y`.
    by_column = [[row[k] for row in grid.tiles] for k in range(len(grid.tiles[0]))]
    with jax.named_scope("tiled_dense"):
        if len(by_column) == 1:
            y = (jax.checkpoint(column) if remat else column)(by_column[0])
        else:
            body = jax.checkpoint(column, prevent_cse=False) if remat else column
            _, y = lax.scan(lambda _, tiles: (None, body(tiles)), None, _stack(by_column))
            y = jnp.moveaxis(y, 0, -2).reshape(*x.shape[:-1], y.shape[0] * y.shape[-1])
        # Without the columns of padding in the last tiles.
        y = y[..., : grid.shape[1]]
        return y if bias is None else y + _along_last(fetch(bias, axis).astype(y.dtype), y)


def _multiply_column(
    axis: AxisNames,
    remat: bool,
    multiply: Callable[[Array, Array], Array],
    x: Array,
    parts: Sequence[Array],
    column_tiles: Sequence[Any],
) -> Array:
    """`Σ_j x_j W_j` over the tiles of one column, summed in float32 or better."""
    if len(parts) == 1:
        return multiply(parts[0], fetch(column_tiles[0], axis))

    def add(total, each):
        part, leaf = each
        return total + multiply(part, fetch(leaf, axis)).astype(total.dtype), None

    first = jax.eval_shape(lambda: multiply(parts[0], _zeros_like_full(column_tiles[0])))
    wide = jnp.promote_types(first.dtype, jnp.float32)
    # In float32: the sum has as many terms as there are tiles.
    start = jnp.zeros(first.shape, wide) + _varying_zero((x, column_tiles)).astype(wide)
    body = jax.checkpoint(add, prevent_cse=False) if remat else add
    return lax.scan(body, start, (jnp.stack(parts), _stack(column_tiles)))[0].astype(first.dtype)


def tiled_mlp(
    x: Array,
    w_in: Any,
    w_out: Any,
    activation: Callable[..., Array] = jax.nn.gelu,
    *,
    bias_in: Any = None,
    bias_out: Any = None,
    splits: int = 1,
    axis: AxisNames = "data",
) -> Array:
    """Computes `activation(x @ w_in + bias_in) @ w_out + bias_out` in pieces of the hidden layer, which is never whole.

    `y += act(x A_k + a_k) B_k` in a loop over `k`, computed again in the backward pass: neither the hidden activations
    `[..., h]` nor a whole kernel is kept, except for kernels that are on the device anyway.

    *On the wire*: as `tiled_dense`, for both kernels.

    *Memory*: `[..., h/splits]` for the hidden layer, and one tile of each kernel.

    Args:
      x: `[..., n]`.
      w_in: `[n, h]`, or the result of `tile(w_in, out_splits=splits)`, its tiles marked or not. A tuple of such kernels
        for gated layers: the activation then gets one argument for each.
      w_out: `[h, m]`, or `tile(w_out, in_splits=splits)`.
      activation: an entrywise function.
      bias_in: `[h]` or `None`; a tuple of them for several `w_in`. `Sharded` ones are gathered in full.
      bias_out: `[m]` or `None`.
      splits: the number of pieces of the hidden layer, for plain kernels. More save memory, until the products become
        too narrow for the device: keep `h/splits` at 512 or more on accelerators.
      axis: the mesh axis over which tiles are `Sharded`.

    Returns:
      `[..., m]`, in the dtype of the product.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import offload
      >>> y = offload.tiled_mlp(jnp.ones((2, 4)), jnp.ones((4, 8)), jnp.ones((8, 4)), jax.nn.relu, splits=4)
      >>> y[0].tolist()
      [32.0, 32.0, 32.0, 32.0]
    """
    several = isinstance(w_in, tuple)
    ins = [_grid("tiled_mlp", kernel, 1, splits) for kernel in (w_in if several else (w_in,))]
    out = _grid("tiled_mlp", w_out, splits, 1)
    hidden, count = out.shape[0], len(out.tiles)
    for grid in ins:
        if len(grid.tiles) != 1 or len(grid.tiles[0]) != count or len(out.tiles[0]) != 1 or grid.shape[1] != hidden:
            raise ValueError(
                f"tiled_mlp needs w_in [n, h] cut by out_splits and w_out [h, m] cut by as many in_splits, got "
                f"{grid.shape} in {len(grid.tiles)} x {len(grid.tiles[0])} tiles and {out.shape} in {count} x "
                f"{len(out.tiles[0])}"
            )
    # The widths of tiles are those of `tile`, rounded up.
    width = -(-hidden // count)
    x = _input_columns(x, ins[0], 0)
    biases = [] if bias_in is None else [fetch(b, axis) for b in (bias_in if several else (bias_in,))]
    # Biases are padded as the tiles are, and cut like the hidden layer.
    biases = [jnp.pad(b, (0, width * count - hidden)).reshape(count, width) for b in biases]

    def add(total, each):
        number, tiles, offsets, last = each
        h = [_multiply(x, fetch(leaf, axis)) for leaf in tiles]
        if offsets:
            h = [y + _along_last(b.astype(y.dtype), y) for y, b in zip(h, offsets, strict=True)]
        if width * count == hidden:
            h = activation(*h)
        else:
            inside = _along_last(number * width + jnp.arange(width) < hidden, h[0])
            # The derivative at zero may be infinite, as that of a square root, and zero times infinity is NaN.
            h = activation(*[jnp.where(inside, y, jnp.ones_like(y)) for y in h])
            # The activation of padding need not be zero.
            h = jnp.where(inside, h, jnp.zeros_like(h))
        return total + _multiply(h, fetch(last, axis)).astype(total.dtype), None

    each = (
        jnp.arange(count),
        _stack([[grid.tiles[0][k] for grid in ins] for k in range(count)]),
        biases,
        _stack([row[0] for row in out.tiles]),
    )
    # Promoted as the products are, and summed in float32 or better.
    dtype = jnp.result_type(x, *(leaf.dtype for leaf in jax.tree.leaves((each[1], each[3]))))
    wide = jnp.promote_types(dtype, jnp.float32)
    with jax.named_scope("tiled_mlp"):
        start = jnp.zeros((*x.shape[:-1], out.shape[1]), wide) + _varying_zero((x, each)).astype(wide)
        y = lax.scan(jax.checkpoint(add, prevent_cse=False), start, each)[0].astype(dtype)
        return y if bias_out is None else y + _along_last(fetch(bias_out, axis).astype(dtype), y)


def fetch(leaf: Any, axis: AxisNames) -> Array:
    """The whole array on the device: copied there from the host, and gathered if it is sharded."""
    if isinstance(leaf, OnHost):
        return fetch(jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), leaf.value), axis)
    if isinstance(leaf, Sharded):
        rows: Any = _gather_for_mean(leaf.value, leaf.axis or axis)
        return rows.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)
    if is_mark(leaf):
        raise ValueError("a PerWorker kernel is whole already: pass its value")
    return leaf


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_for_mean(shard: Array, axis: AxisNames) -> Array:
    """All shards; the gradient is the mean over the workers' losses, of which each has all tiles, and not their sum."""
    return over(axis).all_gather(shard, agreed=False)


_gather_for_mean.defvjp(
    lambda shard, axis: (_gather_for_mean(shard, axis), None),
    lambda axis, _, gradient: (over(axis).reduce_scatter_mean(gradient),),
)


def _grid(name: str, kernel: Any, in_splits: int, out_splits: int) -> Tiled:
    if not isinstance(kernel, Tiled):
        if is_mark(kernel):
            raise ValueError(
                f"{name} needs tiles that are marked, not a mark around the kernel: use zero.shard(tile(kernel, ...))"
            )
        return tile(kernel, in_splits=in_splits, out_splits=out_splits)
    found = len(kernel.tiles), len(kernel.tiles[0])
    if (in_splits, out_splits) not in ((1, 1), found):
        raise ValueError(f"{name} got splits {(in_splits, out_splits)} for a kernel in {found[0]} x {found[1]} tiles")
    return kernel


def _input_columns(x: Array, grid: Tiled, j: int) -> Array:
    """The inputs of the `j`-th row of tiles, padded as the tiles are."""
    if x.ndim == 0 or x.shape[-1] != grid.shape[0]:
        raise ValueError(f"an input of shape {tuple(x.shape)} does not fit a kernel {grid.shape}")
    width = -(-grid.shape[0] // len(grid.tiles))
    part = x[..., j * width : (j + 1) * width]
    return jnp.pad(part, [(0, 0)] * (x.ndim - 1) + [(0, width - part.shape[-1])])


def _along_last(vector: Array, like: Array) -> Array:
    """A vector with as many dimensions as `like`, to broadcast along its last one."""
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


def _multiply(x: Array, w: Array) -> Array:
    return jnp.einsum("...n,nm->...m", x, w)


def _stack(trees: Any) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _zeros_like_full(leaf: Any) -> Array:
    while isinstance(leaf, OnHost):
        leaf = leaf.value
    return jnp.zeros(leaf.shape, leaf.value.dtype if isinstance(leaf, Sharded) else leaf.dtype)


def _varying_zero(tree: PyTree) -> Array:
    """Zero, typed as varying over the workers wherever one of the leaves is: the initial value of a loop's sum."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(lax.stop_gradient(x.ravel()[:0]).sum().astype(jnp.float32) for x in leaves) + jnp.zeros(())


def tiled_layers(*, axis: AxisNames = "data", remat: bool = True) -> Callable[..., Any]:
    """Returns an interceptor for `flax.linen` that computes `Dense` layers with a `Tiled` kernel by `tiled_dense`.

    It is an argument for `flax.linen.intercept_methods`. Other layers run unchanged; their parameters must not be
    marked. `axis` and `remat` are those of `tiled_dense`; `precision` and `dot_general` are those of the layer.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jaxdist import offload
      >>> model, x = nn.Dense(6), jnp.ones((2, 4))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> tiled = params | {"kernel": offload.tile(params["kernel"], out_splits=3)}
      >>> with nn.intercept_methods(offload.tiled_layers()):
      ...     y = model.apply({"params": tiled}, x)
      >>> bool(jnp.allclose(y, model.apply({"params": params}, x), atol=1e-6))
      True
    """
    import flax.linen as nn  # an optional dependency

    def interceptor(layer, args, kwargs, context):
        module = context.module
        if isinstance(module, nn.Dense) and context.method_name == "__call__" and not module.is_initializing():
            kernel = module.get_variable("params", "kernel")
            if isinstance(kernel, Tiled):
                return _compute_dense(axis, remat, module, kernel, *args, **kwargs)
        return layer(*args, **kwargs)

    return interceptor


def _compute_dense(axis: AxisNames, remat: bool, module: Any, kernel: Tiled, inputs: Array) -> Array:
    """What a Dense layer of `flax.linen` returns for its input."""
    if module.dot_general_cls is not None:
        raise ValueError("a Dense layer with dot_general_cls has variables of its own: leave its kernel whole")
    bias = module.get_variable("params", "bias") if module.use_bias else None
    dtype = module.dtype or jnp.result_type(inputs, *jax.tree.leaves((kernel, bias)))
    # Shards are cast before they are gathered: half precision is half the bytes.
    x, grid, bias = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (inputs, kernel, bias))
    dot_general = module.dot_general or lax.dot_general

    def multiply(x: Array, w: Array) -> Array:
        return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=module.precision)

    return _multiply_grid(x, grid, bias, axis=axis, remat=remat, multiply=multiply)
