"""Buffers of the inner optimizer (momenta, variances), which a synchronization keeps, averages or resets."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .._core.compat import is_on_host
from .._core.trees import is_key, to_device
from .._core.types import Array, Flag, PyTree, State
from ..comm.base import Comm
from ..state.marks import NO_PARAMETER, is_mark, parameter_indices
from ..transforms.quantized_state import is_coded
from ..wire.shards import gather_marked, split_marked
from .rounds import cond_or_static, exact_mean

Buffers = Literal["maintain", "reset", "average"]


def update_buffers(
    mode: Buffers, comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree
) -> State:
    """Maintains, resets or averages momentum and the like after a round, if it is due.

    *On the wire* for `"average"`: one all-reduce of all buffers, `2(W-1)/W · 4` bytes an entry; one for the counts.
    """
    if mode == "maintain":
        return state
    if mode == "average" and any(is_coded(x) for x in jax.tree.leaves(state, is_leaf=is_coded)):
        raise ValueError(
            'buffers="average" cannot average the encoded arrays of quantized_state; use buffers="maintain" or "reset"'
        )
    owned = find_buffers(inner, state, params)
    if mode == "average":
        return cond_or_static(
            due, partial(average_buffers, owned), lambda comm, state: comm.varying(state), comm, state
        )
    return cond_or_static(
        due, partial(_reset, owned, inner), lambda comm, state, _: comm.varying(state), comm, state, params
    )


def _reset(owned: PyTree, inner: optax.GradientTransformation, comm: Comm, state: State, params: PyTree) -> State:
    """Buffers as `init` makes them, with the counts that belong to them; schedules go on counting."""
    # `init` is written for whole parameters, and makes whole arrays.
    fresh = split_marked(jax.tree.map(to_device, inner.init(gather_marked(params))))

    def restart_leaf(own, new, old):
        if not own:
            return old
        # Wide gradients have made the moments of half-precision parameters wider than `init` does.
        return _place_like(old, new if is_key(new) else new.astype(old.dtype))

    return comm.varying(jax.tree.map(restart_leaf, owned, fresh, state))


def average_buffers(owned: PyTree, comm: Comm, state: State) -> State:
    """Averages buffers over workers; of the counts that belong to them it takes the largest."""

    def select(floating: bool) -> PyTree:
        return jax.tree.map(
            lambda own, x: to_device(x) if own and jnp.issubdtype(x.dtype, jnp.floating) == floating else None,
            owned,
            state,
        )

    def replace_leaf(old, mean, largest):
        new = old if mean is None and largest is None else largest if mean is None else mean
        return comm.varying(_place_like(old, new))

    means, largest = exact_mean(comm, select(True)), comm.max(select(False))
    return jax.tree.map(replace_leaf, state, means, largest, is_leaf=lambda x: x is None)


def _place_like(old: Array, new: Array) -> Array:
    """Moves a new array to the memory of the old one."""
    return jax.device_put(new, jax.memory.Space.Host) if is_on_host(old) else new


def find_buffers(inner: optax.GradientTransformation, state: State, params: PyTree) -> PyTree:
    """Returns a tree of booleans: true for buffers shaped like the parameters and for the counts of such buffers.

    Adam's bias correction counts since its moments were zero, so that count goes with them. A learning-rate schedule
    counts steps and must go on. A count belongs to a buffer if both are fields of the same NamedTuple.
    """
    params = _without_marks(params)
    numbers = parameter_indices(inner.init, state, params, is_leaf=is_coded)
    # The hyperparameters of `optax.inject_hyperparams` may have names of parameters, such as `b1`.
    like_params = jax.tree_util.tree_map_with_path(
        lambda path, k: k != NO_PARAMETER and not any(getattr(key, "name", None) == "hyperparams" for key in path),
        numbers,
    )
    return _flag_counts(state, like_params, jax.tree.structure(params))


def _flag_counts(node: Any, flags: Any, structure: Any) -> Any:
    """Extends the flags of buffers to the counts and keys of the NamedTuples that they are in."""
    if jax.tree_util.all_leaves([node]):
        return flags
    # One level down: the children of this node, and the flags below each.
    children, outside = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    pairs = list(zip(children, outside.flatten_up_to(flags), strict=True))
    has_buffers = hasattr(node, "_fields") and any(_is_buffer(*pair, structure) for pair in pairs)

    def flag_child(child: Any, flags: Any) -> Any:
        # A field that is another state, beside master parameters, has counts of its own.
        if has_buffers and jax.tree_util.all_leaves([_without_marks(child)]):
            return jax.tree.map(lambda _: True, flags)
        return _flag_counts(child, flags, structure)

    return outside.unflatten([flag_child(*pair) for pair in pairs])


def _is_buffer(node: Any, flags: Any, structure: Any) -> bool:
    found = jax.tree.leaves(flags)
    like_params = jax.tree.structure(_without_marks(node)) == structure or not isinstance(node, tuple)
    return bool(found) and all(found) and like_params


def _without_marks(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: _without_marks(x.value) if is_mark(x) else x, tree, is_leaf=is_mark)
