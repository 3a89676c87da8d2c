"""Another reducer for each kind of leaf, with the collectives of all of them merged."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from .._core.types import Array, Like, PyTree
from ..comm.base import Comm
from ..wire.shards import length
from .base import Reduced, Reducer, as_generator, forward_forms, from_generator, interleave, weakest


def per_leaf(label_fn: Callable[[str, Like], Hashable], reducers: Mapping[Hashable, Reducer | None]) -> Reducer:
    """Chooses a reducer for each leaf: rank 4 for matrices, exact for vectors, nothing for frozen leaves.

    *On the wire*: what the parts send, their collectives merged round by round (one for each direction and dtype). A
    label whose reducer is `None` costs no bytes, and its mean is zero.

    *State*: a dict from label to the state of its reducer.

    Args:
      label_fn: `label_fn(path, leaf)` with the path as `"layers/0/kernel"`, and shape and dtype of the leaf.
      reducers: the reducer of each label; `None` for leaves that are not trained.

    Returns:
      The reducer.

    Raises:
      ValueError: a leaf has a label that `reducers` lacks.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> policy = jd.reducers.per_leaf(
      ...     lambda path, leaf: "matrix" if leaf.ndim > 1 else "vector",
      ...     {"matrix": jd.power_sgd(rank=1, min_compression_rate=0.0), "vector": jd.exact()},
      ... )
      >>> sorted(policy.init({"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}))
      ['matrix', 'vector']
    """
    return _per_leaf(label_fn, reducers, None)


def _per_leaf(
    label_fn: Callable[[str, Like], Hashable], reducers: Mapping[Hashable, Reducer | None], groups: int | None
) -> Reducer:
    """The reducer; with `groups` its reduce-scatter form, around reducers in theirs."""
    parts = {label: reducer for label, reducer in reducers.items() if reducer is not None}

    def split(tree):
        """The label of each leaf, and for each label the tree with the leaves of that label alone."""
        labels = _labels_of(tree, label_fn, list(reducers))
        leaves, structure = jax.tree.flatten(tree)
        return labels, {
            label: structure.unflatten(
                [leaf if own == label else None for leaf, own in zip(leaves, labels, strict=True)]
            )
            for label in parts
        }

    def init(like):
        _, trees = split(like)
        return {label: reducer.init(trees[label]) for label, reducer in parts.items()}

    def messages(updates, state, comm, extras):
        labels, trees = split(updates)
        results = yield from interleave(
            [as_generator(reducer, trees[label], state[label], comm, extras) for label, reducer in parts.items()]
        )
        reduced = {label: result for label, (result, _) in zip(parts, results)}

        def merge(which, zeros):
            merged = []
            structure = jax.tree.structure(updates)
            found = {label: structure.flatten_up_to(result[which]) for label, result in reduced.items()}
            for i, (label, leaf) in enumerate(zip(labels, jax.tree.leaves(updates))):
                merged.append(found[label][i] if label in parts else zeros(leaf))
            return structure.unflatten(merged)

        mean = merge(0, _zeros if groups is None else partial(_zero_shard, groups, comm))
        new_state = {label: part_state for label, (_, part_state) in zip(parts, results)}
        return Reduced(mean, merge(1, _zeros)), new_state

    def rebuild(*inner):
        inside = dict(zip(parts, inner, strict=True))
        return _per_leaf(label_fn, {label: inside.get(label) for label in reducers}, groups)

    forms = forward_forms(rebuild, *parts.values())
    return from_generator("per_leaf", init, messages, law=weakest(*parts.values()), forms=forms)


def _labels_of(tree: PyTree, label_fn: Callable[[str, Like], Hashable], known: list[Hashable]) -> list[Hashable]:
    """The label of each leaf."""
    labels = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        label = label_fn(name, leaf)
        if label not in known:
            where = f"leaf {name!r}" if name else "the tree, which is one leaf,"
            raise ValueError(f"{where} has label {label!r}, but reducers has only {known}")
        labels.append(label)
    return labels


def _zeros(leaf: Like) -> Array:
    # Not zeros_like, which would be typed varying: these zeros were not communicated, and are equal on all workers.
    return jnp.zeros(leaf.shape, leaf.dtype)


def _zero_shard(groups: int, comm: Comm, leaf: Like) -> Array:
    return jnp.zeros(groups * length(leaf.size, groups * comm.size), leaf.dtype)
