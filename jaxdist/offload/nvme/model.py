"""What is on disk: the leaves of the parameters and of the optimizer's state, without their values."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._core.dtypes import explain_dtype
from ..._core.trees import is_overwritten, leaf_name, leaves_with_collections
from ..._core.types import PyTree, State
from ...state.marks import NO_PARAMETER, LeafOrder, is_mark, name_leaf, parameter_indices
from ...transforms.overwritten import explain_overwritten
from ...wire.buffers import leaf_order
from . import arrays
from .arrays import Shard, check_dtype, shards_of, strip_marks
from .chunks import SPAN, Layout, Piece, lay_out, pieces, planes
from .disk import Disk
from .entrywise import Split, split


class Model(NamedTuple):
    """The parameters and the state of an optimizer, without their values.

    `held` are the parameters as the optimizer sees them, `state` its state: shapes and dtypes. `beside[i]` is the leaf
    that entry `i` of the flat state belongs to, -1 for numbers. With `master` the held parameters are on disk. `places`
    are the shardings of the leaves, `None` for numpy.
    """

    tree: Any
    names: list[str]
    leaves: list[Any]
    shapes: list[tuple[int, ...]]
    shards: list[list[Shard]]
    held: PyTree
    state: PyTree
    beside: list[int]
    master: bool
    places: list[Any]

    def forget(self) -> "Model":
        """The model without the parameters themselves, which would otherwise stay in memory."""
        return self._replace(leaves=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.leaves])

    def dtypes(self) -> list[list[Any]]:
        """The dtypes of the arrays on disk, for each leaf: the held parameter, then the state in tree order."""
        held, state = jax.tree.leaves(self.held), jax.tree.leaves(self.state)
        return [
            [*([held[k].dtype] if self.master else []), *(state[i].dtype for i in self._of(k))]
            for k in range(len(self.leaves))
        ]

    def _of(self, leaf: int) -> list[int]:
        return [i for i, k in enumerate(self.beside) if k == leaf]

    def numbers(self) -> list[Any]:
        """The shapes and dtypes of the state that belongs to no leaf, in tree order."""
        pairs = zip(jax.tree.leaves(self.state), self.beside, strict=True)
        return [x for x, k in pairs if k == NO_PARAMETER]

    def lay_out(self, chunk_bytes: int) -> Layout:
        """The layout of all arrays on disk."""
        sizes = [[int(np.prod(shard.shape)) for shard in each] for each in self.shards]
        where = str([[str(shard.index) for shard in each] for each in self.shards])
        return lay_out(self.names, sizes, self.dtypes(), chunk_bytes, where)._replace(order=self.order())

    def order(self) -> LeafOrder:
        """The names and shapes of the parameters and of the optimizer's state, in which arrays follow one another."""
        return (*zip(self.names, self.shapes, strict=True), *leaf_order(self.state))


def describe(inner: optax.GradientTransformationExtraArgs, params: PyTree, master_dtype: Any) -> Model:
    """Describes the parameters and the optimizer's state for them; computes nothing."""
    leaves, shapes, tree = strip_marks(params)
    if master_dtype is not None and not jnp.issubdtype(master_dtype, jnp.floating):
        raise ValueError(f"master_dtype must be floating, got {jnp.dtype(master_dtype)}")
    paths = leaves_with_collections(params, is_mark)
    for (path, _), leaf in zip(paths, leaves, strict=True):
        name = name_leaf("the parameter", path)
        if is_overwritten(path):
            raise ValueError(explain_overwritten(name))
        # Floats of 8 bits are computed in float32 here, and only rounded to them.
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits < 8:
            problem = explain_dtype(leaf.dtype) or "parameters must be floating; keep others out of them"
            raise ValueError(f"{name} has dtype {leaf.dtype}: {problem}")
        check_dtype(leaf.dtype)
    if master_dtype is not None:
        check_dtype(jnp.dtype(master_dtype))
    structs = [jax.ShapeDtypeStruct(s, master_dtype or leaf.dtype) for leaf, s in zip(leaves, shapes, strict=True)]
    outer = jax.tree.structure(params, is_leaf=is_mark)
    held = outer.unflatten(structs)
    state = jax.eval_shape(inner.init, held)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(parameter_indices(inner.init, state, held)), strict=True))
    # Like factored moments, arrays of other shapes are kept in memory, with the numbers.
    found = [k if k != NO_PARAMETER and leaf.shape == structs[k].shape else NO_PARAMETER for leaf, k in pairs]
    for leaf, k in zip(jax.tree.leaves(state), found, strict=True):
        if k == NO_PARAMETER and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                "the optimizer keeps a random key, and random numbers cannot be streamed: keep this optimizer in memory"
            )
    shards = [shards_of(leaf) for leaf in leaves]
    places = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
    return Model(tree, names, leaves, shapes, shards, held, state, found, master_dtype is not None, places)


def split_init(inner: Any, model: Model) -> Split:
    """Splits `init`, for parameters in memory."""
    dtypes = [held.dtype for held in jax.tree.leaves(model.held)]
    likes = [jax.ShapeDtypeStruct(s, leaf.dtype) for leaf, s in zip(model.leaves, model.shapes, strict=True)]
    count = len(likes)

    def f(params):
        held = [p.astype(dtype) for p, dtype in zip(params, dtypes, strict=True)]
        return held, inner.init(jax.tree.structure(model.held).unflatten(held))

    outputs = [[*([k] if model.master else []), *(count + i for i in model._of(k))] for k in range(count)]
    result = split(f, (likes,), leaves=[[k] for k in range(count)], stored=(), outputs=outputs)
    # Held parameters that are not on disk are not stored with the numbers either.
    return result._replace(others=result.others if model.master else result.others[count:])


def split_update(inner: Any, model: Model, gradients: Sequence[Any], extra: dict[str, Any]) -> Split:
    """Splits `update` and `apply_updates`, for gradients in memory and a state on disk."""
    held = jax.tree.leaves(model.held)
    count, states = len(held), len(model.beside)
    outer = jax.tree.structure(model.held)
    likes = [jax.ShapeDtypeStruct(s, g.dtype) for g, s in zip(gradients, model.shapes, strict=True)]

    def f(gradients, state, held, extra):
        # The optimizer sees the dtype of the held parameters, and the caller gets the dtype of its own.
        wide = [g.astype(p.dtype) for g, p in zip(gradients, held, strict=True)]
        params = outer.unflatten(held)
        updates, new_state = inner.update(outer.unflatten(wide), state, params, **extra)
        check_same_dtypes(state, new_state)
        new = jax.tree.leaves(optax.apply_updates(params, updates))
        low = [p.astype(leaf.dtype) for p, leaf in zip(new, model.leaves, strict=True)]
        return low, new_state, new if model.master else []

    # Flat positions: gradients (or low-precision parameters), then the state, then held parameters.
    first = count + states
    on_disk = [[*([first + k] if model.master else []), *(count + i for i in model._of(k))] for k in range(count)]
    ins = [[*on_disk[k], *([] if model.master else [first + k]), k] for k in range(count)]
    outs = [[*on_disk[k], k] for k in range(count)]
    stored = [count + i for i, k in enumerate(model.beside) if k >= 0]
    stored += [count + states + k for k in range(count)] if model.master else []
    return split(f, (likes, model.state, held, extra), leaves=ins, stored=stored, outputs=outs)


def check_same_dtypes(old: State, new: State) -> None:
    """Refuses an optimizer whose state does not keep its dtypes, as on disk it must."""
    paths = jax.tree_util.tree_flatten_with_path(old)[0]
    for (path, was), now in zip(paths, jax.tree.leaves(new), strict=True):
        if was.dtype != now.dtype:
            raise ValueError(
                f"leaf `{leaf_name(path)}` of the optimizer's state is {was.dtype} after `init` and {now.dtype} after "
                "`update`: use master_dtype=jnp.float32, or an optimizer that keeps the dtypes of its state"
            )


def assemble(model: Model, leaves: Sequence[Any], sinks: Sequence[Sequence[arrays.Sink]]) -> PyTree:
    """The tree of the arrays that the sinks have received."""
    new = [arrays.assemble(leaf, [sink.finish() for sink in each]) for leaf, each in zip(leaves, sinks, strict=True)]
    return model.tree.unflatten(new)


def read_params(model: Model, disk: Disk) -> PyTree:
    """The master parameters, with the dtypes and shardings of the parameters in memory."""
    sinks = [
        [arrays.sink(leaf, shard, donate=False) for shard in shards]
        for leaf, shards in zip(model.leaves, model.shards, strict=True)
    ]

    def store_piece(piece, views):
        sinks[piece.leaf][piece.shard].put(piece.start, views[0].astype(model.leaves[piece.leaf].dtype))

    _scan(disk, store_piece)
    return assemble(model, model.leaves, sinks)


def hash_params(model: Model) -> list[list[int]]:
    """The hashes of the parameters in memory, for each shard of each leaf."""

    def hash_shard(leaf: Any, shard: arrays.Shard) -> int:
        source, size = arrays.source(leaf, shard), math.prod(shard.shape)
        # Span by span: a shard on a device is never copied as a whole.
        return sum(arrays.hash_bits(at, source(at, min(SPAN, size - at))) for at in range(0, size, SPAN)) % 2**64

    pairs = zip(model.leaves, model.shards, strict=True)
    return [[hash_shard(leaf, shard) for shard in shards] for leaf, shards in pairs]


def _scan(disk: Disk, visit_piece: Callable[[Piece, list[np.ndarray]], None]) -> None:
    """Calls `visit_piece(piece, arrays)` for the entries of all leaves, in order."""

    def visit(k, data):
        chunk = disk.layout.chunks[k]
        views = planes(data, chunk, disk.layout.dtypes[chunk.stream])
        at = 0
        for piece in pieces(disk.layout.segments[chunk.stream], chunk.start, chunk.start + chunk.length):
            visit_piece(piece, [view[at : at + piece.size] for view in views])
            at += piece.size

    disk.scan(visit)


def read_state(model: Model, disk: Disk) -> State:
    """The whole state in memory, as the optimizer's `init` returns it."""
    dtypes = model.dtypes()
    parts = [
        [[np.empty(int(np.prod(shard.shape)), dtype) for dtype in dtypes[k]] for shard in shards]
        for k, shards in enumerate(model.shards)
    ]

    def store_piece(piece, views):
        for room, view in zip(parts[piece.leaf][piece.shard], views, strict=True):
            room[piece.start : piece.start + view.size] = view

    _scan(disk, store_piece)
    # With master parameters they are the first array of each leaf.
    numbers, flat, seen = iter(disk.numbers), [], [int(model.master)] * len(model.leaves)
    for k in model.beside:
        if k < 0:
            flat.append(next(numbers))
            continue
        leaf, shape = model.leaves[k], model.shapes[k]
        whole = np.empty(leaf.shape, dtypes[k][seen[k]])
        for shard, part in zip(model.shards[k], parts[k], strict=True):
            whole[shard.index] = part[seen[k]].reshape(shard.shape)
        seen[k] += 1
        flat.append(whole.reshape(-1)[: int(np.prod(shape))].reshape(shape))
    return jax.tree.structure(model.state).unflatten(flat)
