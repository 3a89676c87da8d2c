"""A kernel cut into a grid of tiles, each a separate parameter."""

from typing import Any

import jax
import jax.numpy as jnp

from .._core.types import Shape


@jax.tree_util.register_pytree_with_keys_class
class Tiled:
    """A kernel `[n, m]` as a grid of equal tiles, each a separate leaf; made by `tile`.

    Args:
      tiles: `in_splits` rows of `out_splits` tiles, `[⌈n/in_splits⌉, ⌈m/out_splits⌉]` each, or a mark around one.
      shape: `(n, m)`; entries beyond it in the last tiles are zero and stay zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import offload
      >>> grid = offload.tile(jnp.ones((4, 6)), out_splits=3)
      >>> len(grid.tiles), len(grid.tiles[0]), grid.tiles[0][0].shape
      (1, 3, (4, 2))
    """

    __slots__ = ("shape", "tiles")

    def __init__(self, tiles: Any, *, shape: Shape):
        self.tiles, self.shape = tiles, tuple(shape)

    def tree_flatten_with_keys(self):
        """The grid is the only child."""
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

    Raises:
      ValueError: the kernel is not a matrix, or there are fewer rows or columns than splits.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist import offload
      >>> offload.tile(jnp.ones((4, 7)), in_splits=2, out_splits=2).tiles[1][1].tolist()
      [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]

    References:
      Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", arXiv
      2104.07857, 2021 (memory-centric tiling).
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
