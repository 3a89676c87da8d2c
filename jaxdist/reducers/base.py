"""The `Reducer`: every worker's tree in, one mean out that is equal on all workers.

Most reducers are written as a generator: it yields the arrays to communicate as `Messages` and receives the results.
The caller decides how the arrays are packed into collectives: `run` concatenates one reducer's arrays into one
collective for each direction and dtype; `interleave` merges the messages of several reducers first. Reducers whose
communication is conditional write `reduce` directly and have no generator form.
"""

import enum
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax

from .._core.types import Array, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..wire.encoded import NO_CONTRACTION, contraction_form
from ..wire.flat import fuse, fuse_bytes


class Law(enum.IntEnum):
    """How the mean that a reducer returns relates to what workers contributed (`own`); the strongest law comes first.

    Each law is weaker than the one before it, so that `max` gives the law of several reducers side by side.
    """

    MEAN = 0
    """`mean == comm.mean(updates)`, leaf by leaf and without state: further leaves may share its collective, and mesh
    axes that the compiler shards need no specs."""
    EXACT = 1
    """`mean == comm.mean(own)`."""
    TELESCOPING = 2
    """The same up to server residuals, the `Sharded` leaves of the state: what is missing from one mean is added to
    later ones."""
    UNBIASED = 3
    """The same up to server residuals and zero-mean noise that is not fed back."""
    NONE = 4
    """None of these; error feedback refuses the reducer."""


class Reduced(NamedTuple):
    """The result of a reduction: the replicated `mean`, and `own`, this worker's effective contribution to it."""

    mean: Updates
    own: Updates


class Extras(NamedTuple):
    """Values that a training step passes to its reducer, equal on all workers; `None` where it passes none."""

    step: Array | int | None = None
    learning_rate: Array | float | int | None = None


NO_EXTRAS = Extras()


class Messages(NamedTuple):
    """The arrays of one round of communication; the results come back in the same shape.

    Attributes:
      mean: arrays to average; they come back averaged.
      gather: arrays to gather; they come back as `[W, *s]`.
      exchange: arrays `[W, *s]`, row `j` for worker `j`; they come back as `[W, *s]`, row `j` from worker `j`.
      sum: arrays to add in their own dtype, integers too; the sender makes sure that they cannot overflow.
      max: arrays whose elementwise maximum over workers comes back.
      scatter: arrays `[W, *s]`; they come back as `[*s]`, the mean of all workers' rows for this worker.
    """

    mean: Sequence[Array] = ()
    gather: Sequence[Array] = ()
    exchange: Sequence[Array] = ()
    sum: Sequence[Array] = ()
    max: Sequence[Array] = ()
    scatter: Sequence[Array] = ()


Protocol = Generator[Messages, Messages, tuple[Reduced, State]]


class Forms(NamedTuple):
    """Other ways to run a reducer, for the functions that compose reducers.

    Attributes:
      messages: the generator form of `reduce`, with the same arguments, which lets `per_leaf` merge collectives.
      shards: `shards(groups)` is the reduce-scatter form: a reducer whose `mean` has this worker's shard `[n]` of each
        leaf, split as `Sharded(leaf, multiple=8)` is, and whose `own` is whole. With `groups > 1` the leaves are split
        over the workers of that many groups of this size: worker `i` gets, one after the other, the shards of the
        workers at place `i` of all groups. `None`: there is none.
      contraction: the reducer that error feedback wraps instead of this one. `None`: this one.
      no_feedback: the reason why error feedback refuses this reducer, and the fix. `None`: it does not.
    """

    messages: Callable[..., Protocol] | None = None
    shards: "Callable[[int], Reducer] | None" = None
    contraction: "Reducer | None" = None
    no_feedback: str | None = None


class Reducer(NamedTuple):
    """Turns the updates of all workers into one replicated mean.

    Attributes:
      init: `init(like) -> state` from the shapes of what will be reduced. It never communicates.
      reduce: `reduce(updates, state, comm, extras) -> (Reduced, state)`.
      law: how `mean` relates to `own`.
      forms: other ways to run the same method; only functions that compose reducers need them.
    """

    init: Callable[[PyTree[Like]], State]
    reduce: Callable[..., tuple[Reduced, State]]
    law: Law = Law.EXACT
    forms: Forms = Forms()


def from_generator(
    name: str, init: Callable, messages: Callable[..., Protocol], *, law: Law = Law.EXACT, forms: Forms | None = None
) -> Reducer:
    """Makes a reducer from its generator form, `messages(updates, state, comm, extras)`; `name` is its profiler scope.

    Example:
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

    return Reducer(init, reduce, law, (forms or Forms())._replace(messages=messages))


def run(generator: Generator[Messages, Messages, Any], comm: Comm) -> Any:
    """Runs a generator of messages to its end over a group of workers, and returns what it returns."""
    try:
        messages = next(generator)
        while True:
            messages = generator.send(transmit(messages, comm))
    except StopIteration as stop:
        return stop.value


def as_generator(reducer: Reducer, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Protocol:
    """Runs any reducer in its generator form, for `yield from` inside another generator."""
    if reducer.forms.messages is None:
        return reducer.reduce(updates, state, comm, extras)
    return (yield from reducer.forms.messages(updates, state, comm, extras))


def interleave(generators: Sequence[Generator[Messages, Any, Any]]) -> Generator[Messages, Messages, list[Any]]:
    """Runs several generators in lockstep, round `i` of all of them in one `Messages`; returns what each returned."""
    results: list[Any] = [None] * len(generators)
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
        received = yield Messages(*([array for one in sent.values() for array in one[d]] for d in directions))
        inboxes = [iter(arrays) for arrays in received]
        for i, messages in sent.items():
            advance(i, Messages(*([next(inboxes[d]) for _ in messages[d]] for d in directions)))
    return results


def transmit(messages: Messages, comm: Comm) -> Messages:
    """Communicates the arrays, one collective for each direction and dtype."""
    return Messages(
        mean=fuse(comm.mean, messages.mean),
        gather=fuse_bytes(comm.all_gather, messages.gather),
        exchange=fuse_bytes(comm.all_to_all, messages.exchange, rows=True),
        sum=fuse(comm.sum, messages.sum),
        max=fuse(comm.max, messages.max),
        scatter=fuse(comm.reduce_scatter_mean, messages.scatter, rows=True),
    )


def weakest(*reducers: Reducer) -> Law:
    """The law of a combinator of these reducers, which is never `Law.MEAN`: its state or its leaves are its own."""
    return max([Law.EXACT, *(reducer.law for reducer in reducers)])


def forward_forms(rebuild: Callable[..., Reducer], *inner: Reducer, shards: bool = True) -> Forms:
    """The forms of a combinator: `rebuild(*inner)` around the same forms of the reducers inside it.

    Without `shards` the combinator has no reduce-scatter form.
    """
    contractions = [reducer.forms.contraction for reducer in inner]
    reasons = [reducer.forms.no_feedback for reducer in inner if reducer.forms.no_feedback is not None]
    contraction = None
    if any(form is not None for form in contractions):
        contraction = rebuild(*(one if form is None else form for one, form in zip(inner, contractions, strict=True)))

    def rebuild_shards(groups: int) -> Reducer:
        return rebuild(*(shards_of(reducer, groups) for reducer in inner))

    has_shards = shards and all(reducer.forms.shards is not None for reducer in inner)
    return Forms(None, rebuild_shards if has_shards else None, contraction, reasons[0] if reasons else None)


def forms_of(compressor: Compressor, rebuild: Callable[[Compressor], Reducer]) -> Forms:
    """The forms of a reducer of one compressor: error feedback wraps `rebuild` of its contraction."""
    if compressor.contraction is not None:
        return Forms()
    if compressor.variance is None:
        return Forms(no_feedback=NO_CONTRACTION)
    return Forms(contraction=rebuild(contraction_form(compressor)))


HAS_FEEDBACK = "this reducer has error feedback already; use it once, around the reducer that compresses"


def contraction_of(reducer: Reducer) -> Reducer:
    """The form of a reducer to put inside error feedback.

    Raises:
      ValueError: it has none.
    """
    if reducer.law == Law.NONE:
        raise ValueError(
            "error feedback needs to know what each worker contributed, and this reducer (Law.NONE: a majority vote, "
            "a biased second compressor without a server residual) does not say; use it without feedback"
        )
    if reducer.forms.no_feedback is not None:
        raise ValueError(reducer.forms.no_feedback)
    return reducer if reducer.forms.contraction is None else reducer.forms.contraction


def shards_of(reducer: Reducer, groups: int = 1, *, advice: str = "reduce in full") -> Reducer:
    """The reduce-scatter form of a reducer.

    Raises:
      ValueError: it has none; the message ends with the advice.
    """
    if reducer.forms.shards is None:
        raise ValueError(
            "this reducer has no reduce-scatter form; those that have are exact(), two_shot(code), hierarchical() of "
            f"such, error_feedback and loco around two_shot, per_leaf or reducer_schedule of them: use one, or {advice}"
        )
    return reducer.forms.shards(groups)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each leaf to the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def is_map_params_placeholder(like: PyTree) -> bool:
    """Recognizes what `optax.tree.map_params` passes instead of parameters: no leaves, and not a pytree container.

    A reducer whose state does not mirror the parameters leaf by leaf returns a single leaf for it: nothing to map.
    """
    return not jax.tree.leaves(like) and not isinstance(like, dict | list | tuple | None)
