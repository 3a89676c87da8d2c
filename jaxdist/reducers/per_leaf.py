"""Another reducer for each kind of leaf, with the collectives of all of them merged."""

from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp

from .._core.types import Array, Like
from ..wire.shards import length
from .base import Reduced, Reducer, feedback_form, from_rounds, held_by, rounds_of, scatter_form, together, weakest


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
    parts = {label: reducer for label, reducer in reducers.items() if reducer is not None}

    def labels_of(tree):
        def label(path, leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found = label_fn(name, leaf)
            if found not in reducers:
                what = f"leaf {name!r}" if name else "the tree, which is one leaf,"
                raise ValueError(f"{what} has label {found!r}, but reducers has only {list(reducers)}")
            return found

        return [label(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]

    def part(tree, labels, label):
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten([leaf if own == label else None for leaf, own in zip(leaves, labels, strict=True)])

    def init(like):
        labels = labels_of(like)
        return {label: reducer.init(part(like, labels, label)) for label, reducer in parts.items()}

    def rounds(updates, state, comm, *, zero=_zero, **agreed):
        labels = labels_of(updates)
        results = yield from together(
            [
                rounds_of(reducer, part(updates, labels, label), state[label], comm, **agreed)
                for label, reducer in parts.items()
            ]
        )
        structure = jax.tree.structure(updates)
        reduced = {
            label: [structure.flatten_up_to(tree) for tree in result] for label, (result, _) in zip(parts, results)
        }

        def join(which, leaves):
            chosen = [reduced[label][which][i] if label in parts else None for i, label in enumerate(labels)]
            nothing = (zero, _zero)[which]
            return structure.unflatten([nothing(leaf) if new is None else new for new, leaf in zip(chosen, leaves)])

        leaves = jax.tree.leaves(updates)
        new_state = {label: result[1] for label, result in zip(parts, results)}
        return Reduced(join(0, leaves), join(1, leaves)), new_state

    def scatter():
        forms = {label: None if reducer is None else scatter_form(reducer) for label, reducer in reducers.items()}
        form = per_leaf(label_fn, forms)

        def to_pieces(updates, state, comm, *, pods=1, **agreed):
            def zero(leaf):
                return jnp.zeros(pods * length(leaf.size, pods * comm.size), leaf.dtype)

            assert form.rounds is not None
            return form.rounds(updates, state, comm, zero=zero, pods=pods, **agreed)

        return from_rounds("by_leaf_scatter", form.init, to_pieces, law=form.law)

    def held(state, like, comm):
        labels, structure = labels_of(like), jax.tree.structure(like)
        trees = {
            label: structure.flatten_up_to(held_by(reducer, state[label], part(like, labels, label), comm))
            for label, reducer in parts.items()
        }
        leaves = enumerate(zip(jax.tree.leaves(like), labels))
        return structure.unflatten([trees[label][i] if label in trees else _zero(leaf) for i, (leaf, label) in leaves])

    return from_rounds(
        "per_leaf",
        init,
        rounds,
        law=weakest(parts.values()),
        for_feedback=lambda: per_leaf(
            label_fn,
            {label: None if reducer is None else feedback_form(reducer) for label, reducer in reducers.items()},
        ),
        held=held,
        scatter=scatter,
    )


def _zero(leaf: Like) -> Array:  # not zeros_like, which would be typed varying: nothing was sent, and all agree on it
    return jnp.zeros(leaf.shape, leaf.dtype)
