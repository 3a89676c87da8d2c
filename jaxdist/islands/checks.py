"""Checks that a reducer can run over islands: one message, and a kept state that a member's own bytes explain."""

from typing import Any

import jax

from .._core.jaxprs import propagate
from .._core.types import PyTree, State
from ..reducers.base import Law, Reducer
from ..reducers.feedback import EF21State
from ..state.marks import is_mark
from .exchange import common_leaves, encode, run_messages

ONE_MESSAGE = "exact(), compressed(code), or error_feedback around compressed(code)"

# Labels of the trace of a round: what only this island has, what all islands have, and what arrives.
OWN, SHARED, ARRIVED = 1, 2, 4


def check_reducer(reducer: Reducer, like: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays that one island sends in a round.

    Raises:
      ValueError: the reducer sends no message of its own or several, or depends on fixed members.
    """
    state = jax.eval_shape(reducer.init, like)
    problem = None
    if isinstance(state, EF21State):
        problem = "ef21 keeps a sum over fixed members, and islands come and go"
    elif reducer.law == Law.NONE:
        problem = "islands decode one member at a time and average, and the result of this reducer is no such mean"
    elif reducer.forms.messages is None:
        problem = "this reducer has no generator form"
    else:
        try:
            sent = jax.eval_shape(lambda drift, state: encode(reducer, 0, drift, state)[0], like, state)
            problem = _find_disagreement(reducer, like, state, sent)
            if problem is None:
                return sent
        except ValueError as error:
            problem = str(error)
    raise ValueError(f"{reducer}: {problem}; islands take a reducer of one message: {ONE_MESSAGE}")


def _find_disagreement(reducer: Reducer, like: PyTree, state: State, sent: list[Any]) -> str | None:
    """Why islands would not compute the same from the same bytes, or `None`.

    Each island decodes a member with its own drift and state in place of the member's, and takes the replicated leaves
    of the reducer's state after the round from whichever member is decoded last. So the mean may depend on what
    arrives and on what all islands have; the replicated leaves on the latter alone; and what feedback subtracts, which
    is known before anything arrives, on everything but that.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=is_mark)

    def run_round(drift: PyTree, leaves: list[Any], arrived: list[Any]) -> tuple[Any, Any, Any]:
        reduced, after = run_messages(reducer, drift, structure.unflatten(leaves), arrived)
        return reduced.mean, reduced.own, common_leaves(after)

    traced, shapes = jax.make_jaxpr(run_round, return_shape=True)(like, leaves, sent)
    labels = (
        [OWN] * len(jax.tree.leaves(like))
        + [OWN if is_mark(leaf) else SHARED for leaf in leaves for _ in jax.tree.leaves(leaf)]
        + [ARRIVED] * len(sent)
    )
    masks = jax.tree.unflatten(jax.tree.structure(shapes), propagate(traced, labels).masks)
    mean, own, replicated = (set(jax.tree.leaves(part)) for part in masks)
    if any(mask & (OWN | ARRIVED) for mask in replicated):
        return "its state follows from the drifts of the members, so that each island would fit one by itself"
    if any(mask & OWN for mask in mean):
        return "its mean follows from this island's own drift beside what arrives, so that islands would differ"
    if any(mask & ARRIVED for mask in own):
        return "what it takes of a drift follows from those of the others"
    return None
