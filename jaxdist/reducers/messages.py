"""Reducers as generators of messages, so that several of them share one collective."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from .._core.dtypes import explain_dtype
from .._core.types import Like, PyTree, State, Updates
from ..comm.base import Comm
from ..state.marks import name_leaf
from ..wire.buffers import fuse, fuse_bytes
from .reducer import NO_EXTRAS, NO_LIMITS, Extras, Forms, Law, Limits, Messages, Protocol, Reducer


def from_generator(
    name: str,
    init: Callable,
    messages: Callable[..., Protocol],
    *,
    law: Law = Law.EXACT,
    forms: Forms | None = None,
    limits: Limits = NO_LIMITS,
) -> Reducer:
    """Makes a reducer from its generator form, `messages(updates, state, comm, extras)`; `name` is its profiler scope.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.reducers import Messages, Reduced, from_generator
      >>> def messages(updates, state, comm, extras):
      ...     received = yield Messages(mean=[updates])
      ...     return Reduced(received.mean[0], updates), state
      >>> reducer = from_generator("my_mean", lambda like: (), messages)
      >>> reducer.reduce(jnp.ones(2), (), jd.comm.alone())[0].mean.tolist()
      [1.0, 1.0]
    """

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        with jax.named_scope(name):
            return run(messages(updates, state, comm, extras), comm)

    return Reducer(for_real_numbers(init), reduce, law, (forms or Forms())._replace(messages=messages), limits=limits)


def for_real_numbers(init: Callable[[PyTree[Like]], State]) -> Callable[[PyTree[Like]], State]:
    """The `init` of a reducer, which refuses leaves that are complex or have fewer than 16 bits, by their names.

    `from_generator` applies it; a reducer made by hand whose state is wider than the updates does so itself.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import for_real_numbers
      >>> for_real_numbers(lambda like: ())({"w": jnp.zeros(2, jnp.complex64)})
      Traceback (most recent call last):
      ...
      ValueError: the update ['w'] has dtype complex64: compressors, norms and optimizers are defined for real...
    """

    def checked_init(like):
        for path, leaf in jax.tree_util.tree_leaves_with_path(like):
            if problem := explain_dtype(leaf.dtype):
                raise ValueError(f"{name_leaf('the update', path)} has dtype {leaf.dtype}: {problem}")
        return init(like)

    return checked_init


def run(generator: Generator[Messages, Messages, Any], comm: Comm) -> Any:
    """Runs a generator of messages to its end over a group of workers, and returns what it returns."""
    try:
        messages = next(generator)
        while True:
            messages = generator.send(transmit(messages, comm))
    except StopIteration as stop:
        return stop.value


def as_generator(reducer: Reducer, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Protocol:
    """Runs any reducer in its generator form, for `yield from` inside another generator.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.reducers import Reduced, as_generator, from_generator
      >>> def messages(updates, state, comm, extras):
      ...     reduced, state = yield from as_generator(jd.exact(), updates, state, comm, extras)
      ...     return jax.tree.map(jnp.negative, reduced), state
      >>> reducer = from_generator("negative_mean", jd.exact().init, messages)
      >>> reducer.reduce(jnp.ones(2), (), jd.comm.alone())[0].mean.tolist()
      [-1.0, -1.0]
    """
    if reducer.forms.messages is None:
        return reducer.reduce(updates, state, comm, extras)
    return (yield from reducer.forms.messages(updates, state, comm, extras))


def interleave(generators: Sequence[Generator[Messages, Any, Any]]) -> Generator[Messages, Messages, list[Any]]:
    """Runs several generators in lockstep, round `i` of all of them in one `Messages`; returns what each returned."""
    results: list[Any] = [None] * len(generators)
    # Generators may differ in length: those that have ended no longer take part.
    pending: dict[int, Messages] = {}
    directions = range(len(Messages._fields))

    def advance(i, received):
        try:
            pending[i] = generators[i].send(received)
        except StopIteration as stop:
            results[i] = stop.value

    for i in range(len(generators)):
        advance(i, None)
    while pending:
        sent, pending = pending, {}
        received = yield Messages(*([array for messages in sent.values() for array in messages[d]] for d in directions))
        # Results come back in the order of the arrays, so each generator takes as many as it has sent.
        inboxes = [iter(arrays) for arrays in received]
        for i, messages in sent.items():
            advance(i, Messages(*([next(inboxes[d]) for _ in messages[d]] for d in directions)))
    return results


def transmit(messages: Messages, comm: Comm) -> Messages:
    """Communicates the arrays, one collective for each direction and dtype."""
    # Means and sums need one collective for each dtype; what only moves travels as bytes, all dtypes in one.
    return Messages(
        mean=fuse(comm, comm.mean, messages.mean),
        gather=fuse_bytes(comm, comm.all_gather, messages.gather),
        exchange=fuse_bytes(comm, comm.all_to_all, messages.exchange, rows=True),
        sum=fuse(comm, comm.sum, messages.sum),
        max=fuse(comm, comm.max, messages.max),
        scatter=fuse(comm, comm.reduce_scatter_mean, messages.scatter, rows=True),
    )
