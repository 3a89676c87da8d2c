"""The `Reducer`: every worker's tree in, one mean out that is equal on all workers."""

import enum
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, Int, Key, Like, PyTree, Shape, State, Updates
from ..compressors.compressor import Codec, Compressor
from ..compressors.scaled import NO_CONTRACTION, contraction_form


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
    """The first `DrawState`: the key of a seed and the count 0. `partial(init_draws, seed)` is the `init` of a reducer.

    Examples:
      >>> from jaxdist.reducers import init_draws
      >>> int(init_draws(seed=0).count)
      0
    """
    return DrawState(jax.random.key(seed), jnp.zeros((), jnp.int32))


class Extras(NamedTuple):
    """Values that a training step passes to its reducer; `None` where it passes none.

    Attributes:
      step: the number of the step, equal on all workers.
      learning_rate: the rate of the step, equal on all workers.
      examples: the number of examples behind this worker's updates, from methods whose workers may stay away
        (`local_steps`) and for reducers that are `Forms.weighted`; otherwise the updates contain that weight. A worker
        with 0 does not take part, and keeps what it has not sent.
      params: the parameters that the updates change, a tree like these, equal on all workers: those that drifts start
        from (`local_steps`), or those of the gradients (`all_reduce`). Combinators that cut leaves pass none.
    """

    step: Array | int | None = None
    learning_rate: Array | float | int | None = None
    examples: Array | None = None
    params: PyTree | None = None


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
      biased: the contraction δ, as a function of the shape, of a biased code whose error is lost. `None`: the mean is
        unbiased, or what it misses is kept for later.
      weighted: weights workers itself, by `Extras.examples`, and takes updates without weights. `None`: it sends
        nothing that could be weighted.
      codec: the variable-length form of the one message, a `Codec` of the list of its arrays for the tree of updates;
        for engines that send bytes, such as `islands`. `None`: there is none.
    """

    messages: Callable[..., Protocol] | None = None
    shards: "Callable[[int], Reducer] | None" = None
    contraction: "Reducer | None" = None
    biased: Callable[[Shape], Any] | None = None
    weighted: bool | None = False
    codec: Codec | None = None


NO_FORMS = Forms()


class Use(enum.Enum):
    """What a training program may ask of a reducer beyond a mean; the value says where, as in the table of the docs."""

    FEEDBACK = "inside `error_feedback`, `loco`, `ef21`"
    EXAMPLES = "with `examples=`, `active=`"
    PARTS = "on flat parts of leaves: `bucketed`, `partitioned`, `hierarchical(outer=)`"
    SHARDS = "as a reduce-scatter: `zero_redundancy(stage=2)`, `hierarchical(inner=)`"
    MODEL_AXES = "with mesh axes that the compiler shards, without `specs=`"


Limits = Mapping[Use, str]
NO_LIMITS: Limits = MappingProxyType({})


class Reducer(NamedTuple):
    """Turns the updates of all workers into one replicated mean.

    Attributes:
      init: `init(like) -> state` from the shapes of what will be reduced, without communication.
      reduce: `reduce(updates, state, comm, extras) -> (Reduced, state)`.
      law: how `mean` relates to `own`.
      forms: other ways to run the same method; only functions that compose reducers need them.
      limits: for each `Use` that it does not support, why not and what to do instead. A combinator has those of the
        reducers inside, `forward_limits(*inner)`.
      description: the call that made it, such as `power_sgd(rank=4)`, for `repr` and error messages.
    """

    init: Callable[[PyTree[Like]], State]
    reduce: Callable[..., Result]
    law: Law = Law.EXACT
    forms: Forms = NO_FORMS
    description: str = ""
    limits: Limits = NO_LIMITS

    def __repr__(self) -> str:
        return self.description or f"Reducer{tuple(self)}"

    def __hash__(self) -> int:
        # A static argument of compiled functions; a mapping has no hash.
        return hash((self.init, self.reduce, self.law, self.description))


def check_reducer(reducer: Any) -> None:
    """Raises unless the argument is a reducer; a compressor becomes one by `compressed`."""
    if isinstance(reducer, Compressor):
        name = reducer.description or "the argument"
        raise TypeError(f"{name} is a compressor: wrap it in compressed(...), or in two_shot(...)")
    if not isinstance(reducer, Reducer):
        raise TypeError(f"expected a reducer, such as exact() or compressed(qsgd(4)), got {reducer!r}")


def reason_against(use: Use, reducer: Reducer) -> str | None:
    """Why a reducer does not support a use, and what to do instead; `None` if it does.

    Examples:
      >>> import jaxdist as jd
      >>> from jaxdist.reducers import Use, reason_against
      >>> reason_against(Use.FEEDBACK, jd.power_sgd(4)) is None
      True
      >>> reason_against(Use.PARTS, jd.power_sgd(4))[:50]
      'power_sgd factorizes matrices and sends vectors wh'
    """
    check_reducer(reducer)
    if use in reducer.limits:
        return reducer.limits[use]
    if use is Use.FEEDBACK and reducer.law == Law.NONE:
        return NO_LAW
    if use is Use.SHARDS and reducer.forms.shards is None:
        return f"{NO_SHARDS}reduce in full"
    if use is Use.MODEL_AXES and reducer.law != Law.MEAN:
        return NO_MODEL_AXES
    return None


def check_use(use: Use, reducer: Reducer, where: str = "") -> None:
    """Raises `ValueError` with the reason, after `where` and a colon, if a reducer does not support a use."""
    reason = reason_against(use, reducer)
    if reason is not None:
        raise ValueError(f"{where}: {reason}" if where else reason)


def weakest(*reducers: Reducer) -> Law:
    """The law of a combinator of these reducers, which is never `Law.MEAN`: its state or its leaves are its own.

    Examples:
      >>> import jaxdist as jd
      >>> from jaxdist.reducers import weakest
      >>> weakest(jd.exact(), jd.two_shot(jd.qsgd(4))).name, weakest(jd.exact()).name
      ('UNBIASED', 'EXACT')
    """
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
    contraction = None
    if any(form is not None for form in contractions):
        # What has no form of its own goes into error feedback as it is.
        contraction = rebuild(*(whole if form is None else form for whole, form in zip(inner, contractions)))

    def rebuild_shards(groups: int) -> Reducer:
        return rebuild(*(shards_of(reducer, groups) for reducer in inner))

    has_shards = shards and all(reducer.forms.shards is not None for reducer in inner)
    kinds = _weights_of(inner)
    return Forms(
        shards=rebuild_shards if has_shards else None,
        contraction=contraction,
        biased=least_contraction(*inner),
        weighted=next(iter(kinds), None) if len(kinds) < 2 and Use.EXAMPLES not in forward_limits(*inner) else False,
    )


def forward_limits(*inner: Reducer) -> dict[Use, str]:
    """The limits of a combinator: the first reason of the reducers inside, for each use."""
    limits = {use: reason for reducer in reversed(inner) for use, reason in reducer.limits.items()}
    if len(_weights_of(inner)) > 1:
        limits.setdefault(Use.EXAMPLES, MIXED_WEIGHTS)
    return limits


def _weights_of(inner: Sequence[Reducer]) -> set[bool]:
    # Leaves that are not trained have no weights.
    return {reducer.forms.weighted for reducer in inner if reducer.forms.weighted is not None}


def forms_of(compressor: Compressor, rebuild: Callable[[Compressor], Reducer]) -> Forms:
    """The forms of a reducer of one compressor: error feedback wraps `rebuild` of its contraction."""
    if compressor.contraction is not None:
        return Forms(biased=compressor.contraction)
    return Forms(contraction=None if compressor.variance is None else rebuild(contraction_form(compressor)))


def limits_of(compressor: Compressor) -> dict[Use, str]:
    """The limits of a reducer of one compressor."""
    unknown = compressor.contraction is None and compressor.variance is None
    limits = {Use.FEEDBACK: NO_CONTRACTION} if unknown else {}
    return limits | ({Use.EXAMPLES: NO_MAGNITUDES} if unknown and compressor.scale_free else {})


MIXED_WEIGHTS = (
    "examples= and active= cannot weight a median or a trimmed mean inside a combination with other reducers: use one "
    "reducer for all leaves and levels, or leave them out"
)
NO_MAGNITUDES = (
    "examples= and active= cannot weight signs, and a worker without examples would send +1 for each entry: leave them "
    "out, or use a code with magnitudes, such as compressed(scaled_sign())"
)
NO_LAW = (
    "error feedback needs to know what each worker contributed, and this reducer (Law.NONE: a majority vote, "
    "two_shot of a biased code with server_feedback=False) does not say; use it without feedback, or two_shot "
    "with its server residual"
)
NO_SHARDS = (
    "this reducer has no reduce-scatter form; those that have are exact(), two_shot(code), hierarchical() of "
    "such, error_feedback and loco around two_shot, per_leaf or reducer_schedule of them: use one, or "
)
NO_MODEL_AXES = (
    "this reducer needs to know how leaves are sharded: pass specs= to all_reduce or local_steps, or shard the model "
    "over an axis that is mapped by hand"
)
HAS_FEEDBACK = "this reducer has error feedback already; use it once, around the reducer that compresses"


def contraction_of(reducer: Reducer) -> Reducer:
    """The form of a reducer to put inside error feedback, or a method that is a kind of it; raises if it has none.

    Of an unbiased code that is the code scaled by `1/(1+ω)`; a reducer of a biased one is that form itself.

    Examples:
      >>> import jaxdist as jd
      >>> from jaxdist.reducers import contraction_of
      >>> contraction_of(jd.compressed(jd.qsgd(4)))
      compressed(scaled(qsgd(4), closest=False), seed=0)
    """
    check_use(Use.FEEDBACK, reducer)
    return reducer if reducer.forms.contraction is None else reducer.forms.contraction


def shards_of(reducer: Reducer, groups: int = 1, *, advice: str = "reduce in full") -> Reducer:
    """The reduce-scatter form of a reducer; raises, with the advice, if it has none."""
    check_reducer(reducer)
    if reducer.forms.shards is None:
        raise ValueError(NO_SHARDS + advice)
    return reducer.forms.shards(groups)
