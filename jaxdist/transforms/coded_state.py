"""Arrays of a state that lie coded between steps: the node that holds one, and trees of them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._typing import Array, Key, PyTree, Shape
from ..compressors.base import Compressor

# Arrays with fewer entries stay as they are: they weigh nothing, and embeddings, norms and biases are sensitive.
SMALLEST = 4096


@jax.tree_util.register_pytree_with_keys_class
class Coded:
    """The payload that stands for an array of this shape and dtype."""

    __slots__ = ("dtype", "payload", "shape")

    def __init__(self, payload: Any, *, shape: Shape, dtype: DTypeLike):
        self.payload, self.shape, self.dtype = payload, tuple(shape), jnp.dtype(dtype)

    def tree_flatten_with_keys(self):
        """The payload is the only child."""
        return ((jax.tree_util.GetAttrKey("payload"), self.payload),), (self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse."""
        return cls(children[0], shape=aux[0], dtype=aux[1])

    def __repr__(self) -> str:
        return f"Coded({self.payload!r}, shape={self.shape}, dtype={self.dtype.name})"


def is_coded(x: Any) -> bool:
    """Whether `x` stands for an array."""
    return isinstance(x, Coded)


def worth_coding(x: Any, smallest: int = SMALLEST) -> bool:
    """Whether an array of a state is one of many floats."""
    return jnp.issubdtype(x.dtype, jnp.floating) and math.prod(x.shape) >= smallest


def encode_tree(code: Compressor, tree: PyTree, key: Key[Array, ""], wanted: Callable[[Any], bool]) -> PyTree:
    """The tree with a `Coded` for each array that is wanted so; each draws a key of its own."""
    leaves, structure = jax.tree.flatten(tree)

    def one(number: int, x: Array) -> Any:
        if not wanted(x):
            return x
        return Coded(code.compress(x, jax.random.fold_in(key, number)), shape=x.shape, dtype=x.dtype)

    return structure.unflatten([one(*numbered) for numbered in enumerate(leaves)])


def decode_tree(code: Compressor, tree: PyTree) -> PyTree:
    """The inverse of `encode_tree`."""

    def one(x: Any) -> Any:
        return code.decompress(x.payload, jax.ShapeDtypeStruct(x.shape, x.dtype)) if is_coded(x) else x

    return jax.tree.map(one, tree, is_leaf=is_coded)
