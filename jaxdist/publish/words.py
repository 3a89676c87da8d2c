"""The bits of a tree of parameters: flat vectors of unsigned words in host memory, and back."""

import functools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._core.trees import is_key, named_leaves
from .._core.types import PyTree
from .._stores.base import begin_hash
from .base import PublishMismatchError

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


class PublishedLeaf(NamedTuple):
    """What a published leaf is: its path in the tree, its shape, and the name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bits(self) -> np.dtype:
        """The dtype of its words."""
        return _dtypes_of(self.dtype)[0]

    @property
    def values(self) -> np.dtype:
        """The dtype of its entries."""
        return _dtypes_of(self.dtype)[1]

    @property
    def size(self) -> int:
        """The number of its words."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return count * (self.values.itemsize // self.bits.itemsize)


@functools.cache
def _dtypes_of(name: str) -> tuple[np.dtype, np.dtype]:
    """The dtypes of words and of entries, by name: looked up for each leaf of each state."""
    values = jnp.dtype(name)
    return np.dtype(WORDS[values.itemsize]), values


def describe(tree: PyTree, dtype: DTypeLike | None) -> list[PublishedLeaf]:
    """The leaves of a tree as they are published: floating-point ones that are wider than `dtype` in that.

    Raises:
      ValueError: a leaf is a key, or no array of numbers.
    """
    return [_describe_leaf(name, x, dtype) for name, x in named_leaves(tree, "params")]


def signature_of(tree: PyTree) -> tuple[Any, list[tuple[Any, Any]]]:
    """What the description of a tree follows from: its structure, and the shapes and dtypes of its leaves."""
    arrays, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", type(x))) for x in arrays]


def copy_to_host(arrays: Sequence[Any], leaves: Sequence[PublishedLeaf]) -> list[np.ndarray]:
    """Copies arrays, or words, to host memory; later changes of their buffers do not reach the copy."""
    pairs = list(zip(arrays, leaves))
    wide = [n for n, (x, leaf) in enumerate(pairs) if isinstance(x, jax.Array) and x.dtype != leaf.values]
    fresh = dict(zip(wide, cast([arrays[n] for n in wide], [leaves[n] for n in wide])))
    for x in fresh.values():
        x.copy_to_host_async()
    # On CPU the host array is the device's buffer itself, which the caller may donate to the next step.
    return [to_words(fresh.get(n, x), leaf, copy=n not in fresh) for n, (x, leaf) in enumerate(pairs)]


def copy_on_device(arrays: Sequence[Any], leaves: Sequence[PublishedLeaf]) -> list[Any]:
    """Begins to copy arrays within device memory; words in host memory stay there."""
    placed = [n for n, x in enumerate(arrays) if isinstance(x, jax.Array)]
    copies = dict(zip(placed, cast([arrays[n] for n in placed], [leaves[n] for n in placed])))
    return [copies.get(n, x) for n, x in enumerate(arrays)]


def cast(arrays: Sequence[jax.Array], leaves: Sequence[PublishedLeaf]) -> list[jax.Array]:
    """Begins to copy arrays in the dtypes of these leaves, in one program for all on the same devices."""
    groups: dict[frozenset[Any], list[int]] = {}
    for n, x in enumerate(arrays):
        groups.setdefault(frozenset(x.devices()), []).append(n)
    out: dict[int, jax.Array] = {}
    for members in groups.values():
        out |= zip(members, _cast([arrays[n] for n in members], tuple(leaves[n].dtype for n in members)))
    return [out[n] for n in range(len(arrays))]


def to_words(x: Any, leaf: PublishedLeaf, *, copy: bool = True) -> np.ndarray:
    """The words of an array; words are returned as they are."""
    if isinstance(x, np.ndarray):
        return x
    return view_words(np.array(x) if copy else np.asarray(x), leaf)


def view_words(host: np.ndarray, leaf: PublishedLeaf) -> np.ndarray:
    """The words of values, which are cast to the published dtype first."""
    return np.ascontiguousarray(host.astype(leaf.values, copy=False)).reshape(-1).view(leaf.bits)


def view_values(words: np.ndarray, leaf: PublishedLeaf) -> np.ndarray:
    """The values of words, which stay where they are."""
    return words.view(leaf.values).reshape(leaf.shape)


def place(values: Iterable[np.ndarray], like: PyTree) -> PyTree:
    """A tree of these values, sharded as `like`. On CPU an array may become that of a device: it is not changed later.

    `may_alias=False` copies no arrays of NumPy (https://github.com/jax-ml/jax/issues/37830).
    """
    wanted = [getattr(x, "sharding", None) for x in jax.tree.leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), [_place_leaf(x, own) for x, own in zip(values, wanted)])


def check_like(leaves: Sequence[PublishedLeaf], like: PyTree, place: str) -> None:
    """Raises `PublishMismatchError` unless a tree has the names and shapes of what is published; dtypes may differ.

    So it does where arrays here cannot have a dtype that is published: JAX would round its numbers.
    """
    found = {leaf.name: leaf.shape for leaf in leaves}
    wanted = {name: tuple(np.shape(x)) for name, x in named_leaves(like, "params")}
    check_equal(found, wanted, place)
    for leaf in leaves:
        own = jax.dtypes.canonicalize_dtype(leaf.values)
        if own != leaf.values:
            raise PublishMismatchError(
                f"{place} holds {leaf.name!r} in {leaf.dtype}, and JAX makes {own} of that here: set jax_enable_x64 in "
                f"this process, or publish the leaf as jnp.asarray(..., {own})"
            )


def check_equal(found: dict[str, Any], own: dict[str, Any], place: str) -> None:
    """Raises `PublishMismatchError` that names the first leaf in which two descriptions differ."""
    if found != own:
        name = next(name for name in (*found, *own) if found.get(name) != own.get(name))
        raise PublishMismatchError(
            f"{place} holds other parameters: {name!r} is {found.get(name, 'absent')} there and "
            f"{own.get(name, 'absent')} here; follow with the same model, or publish to an empty place"
        )
    if [*found] != [*own]:
        raise PublishMismatchError(f"{place} holds the leaves in the order {[*found]}, not {[*own]}; use the same tree")


def digest_of(words: Sequence[np.ndarray]) -> str:
    """A hash of all bits, 32 hexadecimal digits."""
    total = begin_hash()
    for x in words:
        total.update(x.data)
    return total.hexdigest()


@partial(jax.jit, static_argnums=1)
def _cast(arrays: list[Any], dtypes: tuple[str, ...]) -> list[Any]:
    # A result that is an argument as it is would be its buffer, which the caller may donate.
    return [jnp.array(x, jnp.dtype(dtype), copy=True) for x, dtype in zip(arrays, dtypes)]


def _describe_leaf(name: str, x: Any, dtype: DTypeLike | None) -> PublishedLeaf:
    if isinstance(x, jax.Array) and is_key(x):
        raise ValueError(f"`{name}` is a key of random numbers; publish jax.random.key_data of it, or leave it out")
    own = _dtype_of(x)
    if own is None:
        kind = f"of dtype {x.dtype}" if hasattr(x, "__array__") else f"a {type(x).__name__}"
        raise ValueError(f"`{name}` is {kind}, and no array of numbers; leave it out")
    narrow = dtype is not None and jnp.issubdtype(own, jnp.floating) and jnp.dtype(dtype).itemsize < own.itemsize
    return PublishedLeaf(name, tuple(np.shape(x)), str(jnp.dtype(dtype) if narrow else own))


def _dtype_of(x: Any) -> np.dtype | None:
    """The dtype of an array of numbers, or that which JAX gives to one of Python; `None` for anything else."""
    if isinstance(x, int | float | complex):
        return jnp.result_type(x)
    if not hasattr(x, "__array__"):
        return None
    own = np.dtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)
    # NumPy has numbers of 10 bytes, too.
    longest = 16 if jnp.issubdtype(own, jnp.complexfloating) else 8
    is_number = own == jnp.bool_ or jnp.issubdtype(own, jnp.number)
    return own if is_number and own.itemsize <= longest else None


def _place_leaf(x: np.ndarray, sharding: Any) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # `device_put` would compare the values of all processes, which have the same hash.
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
