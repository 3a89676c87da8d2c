"""Whole parameters of their parts: a gather, coded or over two levels, whose gradient is a reduce-scatter."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._marks import Sharded, is_mark
from .._typing import Array, AxisNames, Like, PRNGKeyArray, PyTree
from ..comm import Comm, over
from ..compressors.base import Compressor, working_dtype
from ..reducers._coded import fold_keys
from ..reducers.base import Reducer
from ..transforms.zero.checks import check_cut
from ..transforms.zero.coded import decode, encode, gather_payloads
from ..transforms.zero.flat import joined


def assembler(
    axis: AxisNames, form: Reducer, compressor: Compressor | None, secondary: bool
) -> tuple[Callable[[PyTree], Any], Callable[[PyTree, Any], PyTree]]:
    """Two functions: what to keep from the forward to the backward pass, and whole parameters of that.

    Args:
      axis: that of the workers.
      form: the reduce-scatter form of the reducer of the gradients.
      compressor: the code of the parameters, or `None`.
      secondary: keep what came over the slow links.

    Returns:
      `keep(params) -> kept` and `assemble(params, kept) -> whole`. The gradient with respect to a part is the mean of
      everybody's gradient for it, as if nothing had been coded; `kept` has none.
    """

    def keep(params):
        comm = over(axis)
        cut = [x for x in jax.tree.leaves(params, is_leaf=is_mark) if isinstance(x, Sharded)]
        if not cut or (compressor is None and not secondary):
            return ()
        parts = lax.stop_gradient([x.value for x in cut])
        if compressor is not None:
            parts = encode(compressor, parts, [x.shape for x in cut], _key_of(parts, comm), comm)
        if secondary:
            parts = gather_payloads(parts, _levels(comm)[1], agreed=False)
        return comm.varying(parts)

    def forward(parts, kept, likes):
        comm = over(axis)
        parts, tree = jax.tree.flatten(parts)
        if compressor is None and not secondary:
            rows = [comm.all_gather(part, agreed=False) for part in parts]
        else:
            rows = gather_payloads(kept, _levels(comm)[0] if secondary else comm, agreed=False)
            if secondary:  # chip and pod to worker, which counts chips first
                rows = jax.tree.map(_by_worker, rows)
            if compressor is not None:
                rows = decode(compressor, rows, parts)
        return tree.unflatten([joined(row, like) for row, like in zip(rows, likes, strict=True)])

    def assemble(params, kept):
        leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
        likes = [jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype) for leaf in leaves if isinstance(leaf, Sharded)]
        if not likes:
            return params
        _check_memory(form, _parts(params), likes)
        check_cut(tree.unflatten([x if isinstance(x, Sharded) else None for x in leaves]), over(axis), what="gathered")
        wholes = _straight_through(lambda parts, kept: forward(parts, kept, likes), form, axis)(_parts(params), kept)
        found = iter(jax.tree.leaves(wholes))
        return tree.unflatten([next(found) if isinstance(leaf, Sharded) else leaf for leaf in leaves])

    return keep, assemble


def _straight_through(forward: Callable[..., PyTree], form: Reducer, axis: AxisNames) -> Callable:
    whole = jax.custom_vjp(forward)

    def backward(_, gradients):
        comm = over(axis)
        gradients = comm.varying(gradients)
        state = fold_keys(form.init(gradients), _hash_of(jax.tree.leaves(gradients)))
        return comm.varying(form.reduce(gradients, state, comm)[0].mean), None

    whole.defvjp(lambda parts, kept: (forward(parts, kept), None), backward)
    return whole


def _parts(params: PyTree) -> PyTree:
    """The parts that this worker has, and nothing for what is not cut."""
    return jax.tree.map(lambda x: x.value if isinstance(x, Sharded) else None, params, is_leaf=is_mark)


def _check_memory(form: Reducer, parts: PyTree, likes: Sequence[Like]) -> None:
    state = jax.eval_shape(form.init, jax.tree.structure(parts).unflatten(likes))
    if any(map(is_mark, jax.tree.leaves(state, is_leaf=is_mark))):
        raise ValueError(
            "the reducer of gathered() runs inside the backward pass and keeps nothing from step to step, and this one "
            "has error feedback: use it without, two_shot(qsgd(4)), or cut only the state, zero_redundancy(reducer=...)"
        )


def _levels(comm: Comm) -> tuple[Comm, Comm]:
    assert comm.inner is not None
    assert comm.outer is not None
    return comm.inner, comm.outer


def _by_worker(x: Array) -> Array:
    """`[L, P, ...]` of the chips of a pod, who have it of all pods -> `[W, ...]`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _key_of(parts: Sequence[Array], comm: Comm) -> PRNGKeyArray:
    """Other draws for other parameters, and the same ones whenever the same parameters are gathered again."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), _hash_of(parts)), comm.index)


def _hash_of(arrays: Sequence[Array]) -> Array:
    """A number that changes with the bits of arrays: of sums in two orders, which cost nothing beside a code."""
    total = jnp.zeros((), jnp.uint32)
    for x in arrays:
        wide = x.astype(working_dtype(x.dtype)).ravel()
        words = lax.bitcast_convert_type(wide.astype(jnp.float32), jnp.uint32)
        odd = 2 * lax.iota(jnp.uint32, words.size) + 1
        total = total * jnp.uint32(0x9E3779B1) + (words * odd).sum(dtype=jnp.uint32)
    return total
