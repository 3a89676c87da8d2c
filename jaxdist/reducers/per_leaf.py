"""A reducer for each group of leaves."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import fold_keys, select_leaves
from .._core.types import Like, PyTree, State, Updates
from ..comm.base import Comm
from ..wire.buffers import shard_length
from .messages import as_generator, from_generator, interleave
from .reducer import Extras, Forms, Law, Protocol, Reduced, Reducer, forward_forms, forward_limits, weakest
from .trees import list_named_leaves


@with_description
def per_leaf(label_fn: Callable[[str, Like], Hashable], reducers: Mapping[Hashable, Reducer | None]) -> Reducer:
    """Chooses a reducer for each leaf: rank 4 for matrices, exact for vectors, nothing for frozen leaves.

    *On the wire*: what the reducers send, with their collectives merged round by round (one for each direction and
    dtype). Leaves whose reducer is `None` send nothing, and their mean is zero. Put error feedback inside, around the
    reducers of the labels: around `per_leaf` it keeps the updates of such leaves too, and delivers all of them at once
    if the leaves are trained later.

    *State*: a dict from label to the state of its reducer.

    Args:
      label_fn: `label_fn(path, leaf)` with the path as `"layers/0/kernel"`, and shape and dtype of the leaf.
      reducers: the reducer of each label; `None` for leaves that are not trained.

    Raises:
      ValueError: a leaf has a label that `reducers` lacks.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> policy = jd.reducers.per_leaf(
      ...     lambda path, leaf: "matrix" if leaf.ndim > 1 else "vector",
      ...     {"matrix": jd.power_sgd(rank=1, min_compression_rate=0.0), "vector": jd.exact()},
      ... )
      >>> sorted(policy.init({"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}))
      ['matrix', 'vector']
    """
    frozen = frozenset(label for label, reducer in reducers.items() if reducer is None)
    known = {label: _ZEROS if reducer is None else reducer for label, reducer in reducers.items()}
    return _LeafGroups(label_fn, known, frozen).as_reducer()


class _LeafGroups(NamedTuple):
    """`frozen`: the labels without a reducer, which have no entry in the state."""

    label_fn: Callable[[str, Like], Hashable]
    reducers: Mapping[Hashable, Reducer]
    frozen: frozenset[Hashable]

    def as_reducer(self) -> Reducer:
        def rebuild(*inner):
            return self._replace(reducers=dict(zip(self.reducers, inner, strict=True))).as_reducer()

        reducers = self.reducers.values()
        forms, law = forward_forms(rebuild, *reducers), weakest(*reducers)
        limits = forward_limits(*reducers)
        return from_generator("per_leaf", self.init, self.messages, law=law, forms=forms, limits=limits)

    def init(self, like: PyTree[Like]) -> State:
        labels = self._labels_of(like)
        trained = {label: reducer for label, reducer in self.reducers.items() if label not in self.frozen}
        # Groups must not share their draws.
        return {
            label: fold_keys(reducer.init(_select_group(like, labels, label)), number)
            for number, (label, reducer) in enumerate(trained.items())
        }

    def messages(self, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
        labels = self._labels_of(updates)
        # In lockstep: round `i` of all reducers shares its collectives.
        generators = [
            as_generator(
                reducer,
                _select_group(updates, labels, label),
                state.get(label, ()),
                comm,
                extras._replace(params=_select_group(extras.params, labels, label)),
            )
            for label, reducer in self.reducers.items()
        ]
        results = dict(zip(self.reducers, (yield from interleave(generators)), strict=True))
        mean, own = (
            _merge_groups(updates, labels, {label: done[i] for label, (done, _) in results.items()}) for i in (0, 1)
        )
        return Reduced(mean, own), {label: new for label, (_, new) in results.items() if label not in self.frozen}

    def _labels_of(self, tree: PyTree) -> list[Hashable]:
        labels = []
        for path, leaf in list_named_leaves(tree):
            label = self.label_fn(path, leaf)
            if label not in self.reducers:
                where = f"leaf {path!r}" if path else "the tree, which is one leaf,"
                raise ValueError(f"{where} has label {label!r}, but reducers has only {list(self.reducers)}")
            labels.append(label)
        return labels


def _select_group(tree: PyTree, labels: Sequence[Hashable], label: Hashable) -> PyTree:
    """The tree with the leaves of one label, and `None` in place of the others."""
    return select_leaves(tree, [i for i, own in enumerate(labels) if own == label])


def _merge_groups(like: PyTree, labels: Sequence[Hashable], trees: Mapping[Hashable, PyTree]) -> PyTree:
    structure = jax.tree.structure(like)
    leaves = {label: structure.flatten_up_to(tree) for label, tree in trees.items()}
    return structure.unflatten([leaves[label][i] for i, label in enumerate(labels)])


def _zero_messages(groups: int | None, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    """The mean is zero, without communication; its shards are with `groups`."""
    # A generator without messages.
    yield from ()
    # Not zeros_like, which would be typed varying: these zeros were not communicated, and are equal on all workers.
    own = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), updates)
    if groups is None:
        return Reduced(own, own), state
    sizes = jax.tree.map(lambda leaf: groups * shard_length(leaf.size, groups * comm.size), updates)
    return Reduced(jax.tree.map(lambda leaf, size: jnp.zeros(size, leaf.dtype), updates, sizes), own), state


def _zeros(groups: int | None, forms: Forms) -> Reducer:
    return from_generator("zeros", lambda like: (), partial(_zero_messages, groups), law=Law.EXACT, forms=forms)


_ZEROS = _zeros(None, Forms(shards=lambda groups: _zeros(groups, Forms(weighted=None)), weighted=None))
