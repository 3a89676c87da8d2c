"""Fragments in islands: which one a round is of, and a training state as one state for each fragment.

The rounds of a run are one sequence, whatever the number of fragments, and each round is of one fragment, in turn. So
members, commits and kept parameters are those of a run without fragments. Where the reducer sends several messages, a
round is of one of them: a fragment has as many rounds, one after another, and the last of them merges it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.trees import named_leaves
from .._core.types import PyTree
from ..local_sgd.fragments import labels_of, merge, split
from ..local_sgd.state import LocalStepsState
from ..state.marks import with_value


class RoundOrder(NamedTuple):
    """The fragments and messages of a run's rounds, and the steps after which these end.

    Attributes:
      order: the fragments that are merged first, and later again and again.
      firsts: the number of steps before the end of each of these.
      sync_period: the number of steps between two merges of a fragment.
      messages: the number of messages of the reducer, each of which has a round.
    """

    order: tuple[int, ...]
    firsts: tuple[int, ...]
    sync_period: int
    messages: int = 1

    @property
    def number(self) -> int:
        """The number of fragments."""
        return len(self.order)

    def fragment_in(self, number: int) -> int:
        """The fragment of a round."""
        return self.order[self.merges_before(number) % self.number]

    def message_in(self, number: int) -> int:
        """The message of a round."""
        return number % self.messages

    def merges_in(self, number: int) -> bool:
        """Whether a round merges its fragment: that of the last message."""
        return self.message_in(number) == self.messages - 1

    def merges_before(self, number: int) -> int:
        """How many of the rounds before this one have merged a fragment."""
        return number // self.messages

    def next_round(self, fragment: int, number: int) -> int:
        """The first round that merges a fragment, from this one on."""
        merges = self.merges_before(number)
        return self.messages * (merges + (self.order.index(fragment) - merges) % self.number + 1) - 1

    def steps_before(self, number: int) -> int:
        """The steps of the run when a round begins."""
        merges = self.merges_before(number)
        if not merges:
            return 0
        turn, place = divmod(merges - 1, self.number)
        return self.firsts[place] + turn * self.sync_period


def schedule_of(config: Any) -> RoundOrder:
    """The schedule of the arguments of `local_steps`: rounds are where its own are."""
    firsts = [first or config.sync_period for first in config.first_rounds]
    order = sorted(range(len(firsts)), key=firsts.__getitem__)
    return RoundOrder(tuple(order), tuple(firsts[i] for i in order), config.sync_period)


class FragmentModel:
    """What meetings change of one fragment: its part of the state of local steps, and of the parameters.

    The state is one of a single fragment. Its trees have `None` for leaves of other fragments, and its inner optimizer
    is that of the whole model.
    """

    def __init__(self, local: LocalStepsState, params: PyTree):
        self.local, self.params = local, params


class Division(NamedTuple):
    """How leaves are divided into fragments: a tree of their numbers, and for each fragment the places of its leaves.

    Without fragments, the only part is the state itself.
    """

    labels: PyTree
    places: tuple[tuple[int, ...], ...]

    def split(self, local: LocalStepsState, params: PyTree) -> list[FragmentModel]:
        """A part for each fragment."""
        number = len(self.places)
        if number == 1:
            return [FragmentModel(local, params)]
        anchors, models = split(local.anchor, self.labels, number), split(params, self.labels, number)
        counts = _split_counts(_counts_of(local), self.places)
        return [FragmentModel(_take_part(local, i, anchors[i], counts[i]), models[i]) for i in range(number)]

    def split_locals(self, local: LocalStepsState) -> list[LocalStepsState]:
        """The states of `split` alone."""
        return [part.local for part in self.split(local, local.anchor)]

    def join(self, parts: Sequence[FragmentModel]) -> tuple[LocalStepsState, PyTree]:
        """Inverts `split`; what is of the whole model is that of the first part."""
        if len(parts) == 1:
            return parts[0].local, parts[0].params
        local = self.join_locals([part.local for part in parts])
        return local, merge([part.params for part in parts], self.labels)

    def join_locals(self, locals_: Sequence[LocalStepsState]) -> LocalStepsState:
        """Inverts `split_locals`."""
        if len(locals_) == 1:
            return locals_[0]
        counts = _join_counts([_counts_of(local) for local in locals_], self.places)
        return _with_counts(locals_[0], counts)._replace(
            anchor=merge([local.anchor for local in locals_], self.labels),
            outer=tuple(local.outer[0] for local in locals_),
            reducer=tuple(local.reducer[0] for local in locals_),
        )

    def describe(self, schedule: RoundOrder) -> dict[str, Any]:
        """What all islands must have in common, as JSON can hold it; nothing without fragments."""
        if schedule.number == 1:
            return {}
        return {
            "fragments": {name: int(label) for name, label in named_leaves(self.labels)},
            "order of fragments": list(schedule.order),
        }


def divide(config: Any, anchor: PyTree) -> Division:
    """The division of a model.

    Raises:
      ValueError: a fragment would have no leaves.
    """
    number, labels = config.fragments.number, labels_of(config.fragments, anchor)
    flat = jax.tree.leaves(labels)
    empty = sorted(set(range(number)) - set(flat)) if number > 1 else []
    if empty:
        raise ValueError(
            f"fragments {empty} of {number} have no leaves, and a round would have nothing to send: the model has "
            f"{len(flat)} leaves; use fewer fragments"
        )
    return Division(labels, tuple(tuple(i for i, one in enumerate(flat) if one == label) for label in range(number)))


def _take_part(local: LocalStepsState, fragment: int, anchor: PyTree, counts: Sequence[Any]) -> LocalStepsState:
    return _with_counts(local, counts)._replace(
        anchor=anchor, outer=(local.outer[fragment],), reducer=(local.reducer[fragment],)
    )


def _counts_of(local: LocalStepsState) -> tuple[Any, ...]:
    return local.since, local.rounds, local.rates, local.examples.value


def _with_counts(local: LocalStepsState, counts: Sequence[Any]) -> LocalStepsState:
    since, rounds, rates, examples = counts
    return local._replace(since=since, rounds=rounds, rates=rates, examples=with_value(local.examples, examples))


# One program for all fragments, and none that depends on the one that a round is of.


@partial(jax.jit, static_argnums=1)
def _split_counts(counts: tuple[Any, ...], places: tuple[tuple[int, ...], ...]) -> list[tuple[Any, ...]]:
    *of_fragments, examples = counts
    return [(*(x[i : i + 1] for x in of_fragments), examples[np.asarray(leaves)]) for i, leaves in enumerate(places)]


@partial(jax.jit, static_argnums=1)
def _join_counts(counts: list[tuple[Any, ...]], places: tuple[tuple[int, ...], ...]) -> list[Any]:
    *of_fragments, examples = (jnp.concatenate(parts) for parts in zip(*counts))
    return [*of_fragments, examples[np.argsort(np.concatenate(places))]]
