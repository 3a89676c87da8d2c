"""The `Reducer`: every worker's tree in, one mean out that is equal on all workers; and `exact`, the mean itself.

Most reducers are generators: they yield the arrays to communicate as `Messages` and receive the results. The caller
packs the arrays: `run` into one collective for each direction and dtype, `interleave` those of several reducers
together. Reducers whose communication is conditional write `reduce` directly and have no generator form.
"""

import enum
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import narrow, widen
from .._core.types import Array, Float, Int, Key, Like, PyTree, Shape, State, Updates
from ..comm.base import Comm
from ..compressors.base import NO_CONTRACTION, Codec, Compressor, contraction_form
from ..wire.flat import fuse, fuse_bytes, rows


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
    """The result of a reduction.

    Attributes:
      mean: a tree like the updates, the same on all workers.
      own: this worker's effective contribution to it, a tree like the updates.
    """

    mean: Updates
    own: Updates


class DrawState(NamedTuple):
    """The replicated state of a reducer that draws random numbers: the key of all draws, and the reductions so far."""

    key: Key[Array, ""]
    count: Int[Array, ""]


def init_draws(seed: int, like: PyTree[Like] = ()) -> DrawState:
    """The first state of such a reducer; with a `seed` it is the `init` of one whose state is no larger."""
    return DrawState(jax.random.key(seed), jnp.zeros((), jnp.int32))


class Extras(NamedTuple):
    """Values that a training step passes to its reducer; `None` where it passes none.

    Attributes:
      step: the number of the step, equal on all workers.
      learning_rate: the rate of the step, equal on all workers.
      examples: the number of examples behind this worker's updates, from methods whose workers may stay away
        (`local_steps`) and for reducers that are `Forms.weighted`; otherwise the updates contain that weight. A worker
        with 0 does not take part, and keeps what it has not sent.
    """

    step: Array | int | None = None
    learning_rate: Array | float | int | None = None
    examples: Array | None = None


NO_EXTRAS = Extras()


class Messages(NamedTuple):
    """The arrays of one round of communication; the results come back in the same shape.

    Attributes:
      mean: arrays to average.
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


Result = tuple[Reduced, State]
Protocol = Generator[Messages, Messages, Result]


class Forms(NamedTuple):
    """Other ways to run a reducer, for the functions that compose reducers.

    Attributes:
      messages: the generator form of `reduce`, with the same arguments, which lets `per_leaf` merge collectives.
      shards: `shards(groups)` is the reduce-scatter form: a reducer whose `mean` has this worker's shard `[n]` of each
        leaf, split as `Sharded(leaf, multiple=8)` is, and whose `own` is whole. With `groups > 1` the leaves are split
        over the workers of that many groups of this size: worker `i` gets, one after the other, the shards of the
        workers at place `i` of all groups.
      contraction: the reducer that error feedback wraps instead of this one. `None`: this one.
      no_feedback: the reason why error feedback refuses this reducer, and the fix. `None`: it does not.
      biased: the contraction δ, as a function of the shape, of a biased code whose error is lost. `None`: the mean is
        unbiased, or what it misses is kept for later.
      weighted: weights workers itself, by `Extras.examples`, and takes updates without weights. `None`: it sends
        nothing that could be weighted.
      no_examples: the reason why weights by examples are refused, and the fix. `None`: they are not.
      no_parts: the reason why it must not be given flat parts of leaves, and the fix. `None`: it may be.
      codec: the variable-length form of the one message, a `Codec` of the list of its arrays for the tree of updates;
        for engines that send bytes, such as `islands`. `None`: there is none.
    """

    messages: Callable[..., Protocol] | None = None
    shards: "Callable[[int], Reducer] | None" = None
    contraction: "Reducer | None" = None
    no_feedback: str | None = None
    biased: Callable[[Shape], Any] | None = None
    weighted: bool | None = False
    no_examples: str | None = None
    no_parts: str | None = None
    codec: Codec | None = None


NO_FORMS = Forms()


class Reducer(NamedTuple):
    """Turns the updates of all workers into one replicated mean.

    Attributes:
      init: `init(like) -> state` from the shapes of what will be reduced, without communication.
      reduce: `reduce(updates, state, comm, extras) -> (Reduced, state)`.
      law: how `mean` relates to `own`.
      forms: other ways to run the same method; only functions that compose reducers need them.
      description: the call that made it, such as `power_sgd(rank=4)`, for `repr` and error messages.
    """

    init: Callable[[PyTree[Like]], State]
    reduce: Callable[..., Result]
    law: Law = Law.EXACT
    forms: Forms = NO_FORMS
    description: str = ""

    def __repr__(self) -> str:
        return self.description or f"Reducer{tuple(self)}"


def from_generator(
    name: str, init: Callable, messages: Callable[..., Protocol], *, law: Law = Law.EXACT, forms: Forms | None = None
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


def check_reducer(reducer: Any) -> None:
    """Raises unless the argument is a reducer; a compressor becomes one by `compressed`."""
    if isinstance(reducer, Compressor):
        name = reducer.description or "the argument"
        raise TypeError(f"{name} is a compressor: wrap it in compressed(...), or in two_shot(...)")
    if not isinstance(reducer, Reducer):
        raise TypeError(f"expected a reducer, such as exact() or compressed(qsgd(4)), got {reducer!r}")


def weakest(*reducers: Reducer) -> Law:
    """The law of a combinator of these reducers, which is never `Law.MEAN`: its state or its leaves are its own."""
    return max([Law.EXACT, *(reducer.law for reducer in reducers)])


def least_contraction(*reducers: Reducer) -> Callable[[Shape], Any] | None:
    """The contraction of the most biased of several reducers, `Forms.biased` of a combinator."""
    found = [reducer.forms.biased for reducer in reducers if reducer.forms.biased is not None]
    return (lambda shape: min(contraction(shape) for contraction in found)) if found else None


def forward_forms(rebuild: Callable[..., Reducer], *inner: Reducer, shards: bool = True) -> Forms:
    """The forms of a combinator: `rebuild(*inner)` around those of the reducers inside."""
    for reducer in inner:
        check_reducer(reducer)
    contractions = [reducer.forms.contraction for reducer in inner]
    reasons = [reducer.forms.no_feedback for reducer in inner if reducer.forms.no_feedback is not None]
    contraction = None
    if any(form is not None for form in contractions):
        # What has no form of its own goes into error feedback as it is.
        contraction = rebuild(*(whole if form is None else form for whole, form in zip(inner, contractions)))

    def rebuild_shards(groups: int) -> Reducer:
        return rebuild(*(shards_of(reducer, groups) for reducer in inner))

    whole = [reducer.forms.no_parts for reducer in inner if reducer.forms.no_parts is not None]
    has_shards = shards and all(reducer.forms.shards is not None for reducer in inner)
    shards_form, reason = rebuild_shards if has_shards else None, reasons[0] if reasons else None
    weighted, no_examples = _weights_of(inner)
    return Forms(
        shards=shards_form,
        contraction=contraction,
        no_feedback=reason,
        biased=least_contraction(*inner),
        weighted=weighted,
        no_examples=no_examples,
        no_parts=whole[0] if whole else None,
    )


def _weights_of(inner: Sequence[Reducer]) -> tuple[bool | None, str | None]:
    """Whether a combinator of these reducers weights workers itself, and the reason why it refuses to."""
    reasons = [reducer.forms.no_examples for reducer in inner if reducer.forms.no_examples is not None]
    # Leaves that are not trained have no weights.
    kinds = {reducer.forms.weighted for reducer in inner} - {None}
    if reasons or len(kinds) > 1:
        return False, reasons[0] if reasons else MIXED_WEIGHTS
    return (kinds.pop() if kinds else None), None


def forms_of(compressor: Compressor, rebuild: Callable[[Compressor], Reducer]) -> Forms:
    """The forms of a reducer of one compressor: error feedback wraps `rebuild` of its contraction."""
    if compressor.contraction is not None:
        return Forms(biased=compressor.contraction)
    if compressor.variance is None:
        return Forms(no_feedback=NO_CONTRACTION, no_examples=NO_MAGNITUDES if compressor.scale_free else None)
    return Forms(contraction=rebuild(contraction_form(compressor)))


MIXED_WEIGHTS = (
    "examples= cannot weight a median or a trimmed mean inside a combination with other reducers: use one reducer for "
    "all leaves and levels, or leave examples= out"
)
NO_MAGNITUDES = (
    "examples= cannot weight signs, and a worker without examples would send +1 for each entry: leave examples= out, "
    "or use a code with magnitudes, such as compressed(scaled_sign())"
)
HAS_FEEDBACK = "this reducer has error feedback already; use it once, around the reducer that compresses"


def contraction_of(reducer: Reducer) -> Reducer:
    """The form of a reducer to put inside error feedback; raises if it has none."""
    check_reducer(reducer)
    if reducer.forms.no_feedback is not None:
        raise ValueError(reducer.forms.no_feedback)
    if reducer.law == Law.NONE:
        raise ValueError(
            "error feedback needs to know what each worker contributed, and this reducer (Law.NONE: a majority vote, "
            "two_shot of a biased code with server_feedback=False) does not say; use it without feedback, or two_shot "
            "with its server residual"
        )
    return reducer if reducer.forms.contraction is None else reducer.forms.contraction


def shards_of(reducer: Reducer, groups: int = 1, *, advice: str = "reduce in full") -> Reducer:
    """The reduce-scatter form of a reducer; raises, with the advice, if it has none."""
    check_reducer(reducer)
    if reducer.forms.shards is None:
        raise ValueError(
            "this reducer has no reduce-scatter form; those that have are exact(), two_shot(code), hierarchical() of "
            f"such, error_feedback and loco around two_shot, per_leaf or reducer_schedule of them: use one, or {advice}"
        )
    return reducer.forms.shards(groups)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each leaf to the dtype of its counterpart, as `narrow` does."""
    return jax.tree.map(lambda x, y: narrow(x, y.dtype), tree, like)


def list_named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves with their paths, as `"layers/0/kernel"`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def tree_norm(tree: Updates) -> Float[Array, ""]:
    """The L2 norm of all leaves together, in float32."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0).astype(jnp.float32) for leaf in leaves]).max()
    # Squares of quotients of the largest entry neither vanish nor overflow.
    unit = jnp.where(largest == 0, 1.0, largest)
    squares = [jnp.sum(jnp.square((widen(leaf) / unit).astype(jnp.float32))) for leaf in leaves]
    return unit * jnp.sqrt(jnp.stack(squares).sum())


def is_map_params_placeholder(like: PyTree) -> bool:
    """Recognizes what `optax.tree.map_params` passes instead of parameters: no leaves, and not a pytree container.

    A reducer whose state does not mirror the parameters leaf by leaf returns a single leaf for it: nothing to map.
    """
    structure = jax.tree.structure(like)
    # A container of parameters has `None` in place of those that are elsewhere, and each is a node.
    return structure.num_nodes == 1 and not structure.num_leaves and not isinstance(like, dict | list | tuple | None)


@with_description
def exact() -> Reducer:
    """The mean over workers: `mean = (1/W) Σ_w x_w`, bit for bit what `lax.pmean` of the concatenated leaves gives.

    *On the wire*: one all-reduce for each dtype; a worker sends `2(W-1)/W · itemsize · size` bytes. On CPU, where
    XLA would widen bfloat16 and gloo adds float16 slowly, bfloat16 and long arrays of float16 are sent as u16 words and
    added in float32. The reduce-scatter form sends half of that, padded.

    *State*: none.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.exact()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([1.0, 3.0])).tolist()
      [2.0, 2.0]
    """
    return from_generator("exact", lambda like: (), _exact_messages, law=Law.MEAN, forms=Forms(shards=_exact_shards))


def _exact_messages(updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    received = yield Messages(mean=leaves)
    # Nothing is lost, so a worker's contribution is its updates.
    return Reduced(tree.unflatten(received.mean), updates), state


def _exact_shards(groups: int) -> Reducer:
    return from_generator("exact_shards", lambda like: (), partial(_exact_shard_messages, groups), law=Law.MEAN)


def _exact_shard_messages(groups: int, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    # Row `j` has the shard of worker `j`, padded as `Sharded` pads it.
    received = yield Messages(scatter=[rows(leaf, comm.size, groups=groups) for leaf in leaves])
    return Reduced(tree.unflatten(received.scatter), updates), state
