"""The arithmetic of a round: an island's drift as bytes, and the outer step that every island takes alike.

A reducer is a generator of the arrays that it sends. An island runs it up to its message, puts these arrays into the
store, and runs it again for every member of the round, with that member's arrays as if they were all that arrived.
Since one member is decoded at a time, no change of membership compiles anything.

Of several messages each has a round. The rounds before the last change no parameters: they only give all islands the
mean of a message, `received`, with which they run the reducer up to the next one. So what an island has done is taken
if, and only if, its last message counts, whichever islands counted before.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._core.hashing import hash_array
from .._core.jaxprs import combines_entries, propagate
from .._core.types import Array, PyTree, State, Updates
from .._core.xla_quirks import reduce_all
from .._stores.base import hash_of
from ..comm.base import alone
from ..local_sgd.merging import Merge, Polar, from_polar, to_polar
from ..local_sgd.nested import advance_schedules, mark_inner, unmark_inner, update_inner_buffers
from ..local_sgd.rounds import round_like
from ..local_sgd.state import LocalStepsState
from ..reducers.ef21 import EF21State
from ..reducers.reducer import NO_EXTRAS, Extras, Law, Messages, Reduced, Reducer
from ..state.marks import is_mark, with_value
from ..state.placement import place_leaf
from .model import find_mesh

ONES_THAT_WORK = "exact(), compressed(code), power_sgd(rank), or error_feedback or compute_visible around these"
# Labels of the trace of a round: what only this island has, what all islands have, and what arrives.
OWN, SHARED, ARRIVED = 1, 2, 4


# In place of a number of examples, before a step of the round has counted any.
UNCOUNTED = -1.0
# The means of the messages of a round before its open one.
Received = Sequence[Sequence[Any]]


class Shared(NamedTuple):
    """What all islands compute alike: global parameters, outer state, and replicated leaves of the reducer's state."""

    anchor: Updates
    outer: State
    reducer: list[Array]


class RoundMethod(NamedTuple):
    """The static part of every program of a round: a reducer, an outer optimizer, and how drifts are merged."""

    reducer: Reducer
    outer: optax.GradientTransformationExtraArgs
    merge: Merge = "mean"

    def begin_total(self, anchor: Updates) -> Updates | Polar:
        """Returns what the first member of a round is added to."""
        zeros = zeros_like(anchor)
        if self.merge == "mean":
            return zeros
        return Polar(zeros, jax.tree.map(lambda x: np.zeros((), x.dtype), zeros))


def select_shared(state: LocalStepsState) -> Shared:
    """The part of a state of local steps that all islands share."""
    return Shared(state.anchor, state.outer[0], common_leaves(state.reducer[0]))


def commit_counts(state: LocalStepsState) -> LocalStepsState:
    """Returns the state with counts bound to their devices, as steps return them beside such parameters."""
    counts = {name: getattr(state, name) for name in ("count", "since", "rounds", "rates", "examples")}
    return state._replace(**jax.tree.map(lambda x: x if x.committed else jax.device_put(x, x.sharding), counts))


def with_shared(state: LocalStepsState, shared: Shared) -> LocalStepsState:
    """Returns the state with another shared part."""
    return state._replace(
        anchor=shared.anchor, outer=(shared.outer,), reducer=(_with_replicated(state.reducer[0], shared.reducer),)
    )


def encode(
    reducer: Reducer,
    index: Array | int,
    drift: Updates,
    state: State,
    extras: Extras = NO_EXTRAS,
    received: Received = (),
) -> tuple[list[Array], State]:
    """Returns the arrays that this island sends for its drift, and the reducer's state once they are taken.

    That of a message before the last takes nothing. `index` is the number that the keys of its draws are folded with,
    as that of a worker is. Without examples the drift counts for nothing, and error feedback keeps its residual.
    """
    generator, sent = _begin(reducer, drift, state, index, extras, received)
    result = _answer(generator, sent, _arrays(sent))
    return _arrays(sent), state if isinstance(result, Messages) else result[1]


def decode(
    reducer: Reducer, like: Updates, arrays: Sequence[Any], state: State, received: Received = ()
) -> tuple[Updates, State]:
    """Returns one member's contribution `D(C(Δ_w))`, and the reducer's state after it: its replicated leaves count."""
    reduced, after = run_messages(reducer, jax.tree.map(jnp.zeros_like, like), state, arrays, received)
    return reduced.mean, after


def run_messages(
    reducer: Reducer, updates: Updates, state: State, arrays: Sequence[Any], received: Received = ()
) -> tuple[Reduced, State]:
    """Returns what the reducer does when these arrays, of one member, are all that arrives of its last message."""
    # The parameters of the member are not here: `check_reducer` finds out whether the mean would follow from them.
    result = _answer(*_begin(reducer, updates, state, 0, Extras(params=updates), received), arrays)
    assert not isinstance(result, Messages)
    return result


def _begin(
    reducer: Reducer, updates: Updates, state: State, index: Array | int, extras: Extras, received: Received
) -> tuple[Any, Messages]:
    """Runs the generator up to the message after those whose means are `received`."""
    assert reducer.forms.messages is not None
    comm = alone()._replace(index=jnp.asarray(index, jnp.int32))
    generator = reducer.forms.messages(updates, state, comm, extras)
    sent = next(generator, None)
    if sent is None:
        # A part of it communicates by itself, as one whose messages depend on a value must.
        raise ValueError("this reducer has no generator form")
    for means in received:
        sent = _answer(generator, sent, means)
        assert isinstance(sent, Messages)
    return generator, sent


def _arrays(message: Messages) -> list[Array]:
    others = [*message.exchange, *message.sum, *message.max, *message.scatter]
    if others or (message.gather and message.mean):
        raise ValueError("this reducer sends in several directions")
    return list(message.gather or message.mean)


def _answer(generator: Any, sent: Messages, arrays: Sequence[Any]) -> Messages | tuple[Reduced, State]:
    """Returns the next message, or the result, where these arrays are all that arrives."""
    arrived = Messages(gather=[x[None] for x in arrays]) if sent.gather else Messages(mean=list(arrays))
    try:
        return generator.send(arrived)
    except StopIteration as stop:
        return stop.value


# The programs of a round. They depend on the method, not on the members, and are compiled once for all islands of a
# process.


@jax.jit
def measure_drift(anchor: Updates, params: PyTree) -> Updates:
    """Returns `Δ = a - p`, in float32: a mean of bfloat16 parameters would lose small steps."""
    return jax.tree.map(lambda a, p: round_like(a, p) - p.astype(a.dtype), anchor, params)


@partial(jax.jit, static_argnums=0)
def encode_drift(
    method: RoundMethod,
    index: Array,
    anchor: Updates,
    params: PyTree,
    state: State,
    examples: Array,
    received: Received = (),
) -> tuple[list[Array], State, Array, Array]:
    """Returns what `encode` does of `measure_drift`, whether all of it is finite, and whether there is any drift."""
    drift, start = measure_drift(anchor, params), jax.tree.map(round_like, anchor, params)
    arrays, after = encode(method.reducer, index, drift, state, Extras(examples=examples, params=start), received)
    kept = [x for x in jax.tree.leaves((drift, arrays, after)) if jnp.issubdtype(x.dtype, jnp.floating)]
    is_finite = jnp.all(jnp.stack([reduce_all(jnp.all, jnp.isfinite(x)) for x in kept]))
    moved = jnp.any(jnp.stack([reduce_all(jnp.any, x != 0) for x in jax.tree.leaves(drift)]))
    return arrays, after, is_finite, moved


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def add_member(
    method: RoundMethod,
    total: Updates | Polar,
    arrays: Sequence[Any],
    weight: Array,
    state: State,
    received: Received = (),
) -> tuple[Updates | Polar, list[Array]]:
    """Returns `total + n_w D(C(Δ_w))`, in its place, and the replicated leaves of the reducer's state after the round.

    With `merge="rda"` the total is that of directions and of lengths.
    """
    like = total.directions if isinstance(total, Polar) else total
    contribution, after = decode(method.reducer, like, arrays, state, received)
    contribution = to_polar(contribution) if isinstance(total, Polar) else contribution
    total = jax.tree.map(lambda t, x: t + weight.astype(t.dtype) * x, total, contribution)
    return total, common_leaves(after)


def let_go(total: Updates | Polar) -> None:
    """Waits until a sum is there, and frees the arrays of the member that was added last."""
    jax.block_until_ready(total)
    # JAX drops its references to arrays of NumPy in a later call.
    jax.device_put(np.int32(0), jax.local_devices()[0])


@jax.jit
def add_arrays(total: Sequence[Any], arrays: Sequence[Any], weight: Array) -> list[Array]:
    """Returns `total + n_w x_w` of the arrays of a message."""
    return [t + weight.astype(t.dtype) * x for t, x in zip(total, arrays, strict=True)]


@jax.jit
def divide_arrays(total: Sequence[Any], weight: Array) -> list[Array]:
    """Returns the mean of a message, as `take_outer_step` divides."""
    return [t * (1 / weight.astype(t.dtype)) for t in total]


@partial(jax.jit, static_argnums=0)
def renew_reducer(
    method: RoundMethod, like: Updates, means: Sequence[Any], state: State, received: Received
) -> list[Array]:
    """Returns the replicated leaves of the reducer's state after the mean of its last message."""
    return common_leaves(decode(method.reducer, like, means, state, received)[1])


def take_outer_step(
    method: RoundMethod,
    shared: Shared,
    total: Updates | Polar,
    weight: Array | np.float32,
    reducer: list[Array],
    rate: Array | np.float32 | None,
) -> Shared:
    """Takes `a += outer(Δ)` with `Δ = Σ n_w D(C(Δ_w)) / Σ n_w`, or what `merge` makes of directions and lengths.

    The new global parameters take the place of the total.
    """
    return step_from_total(method, shared, *split_total(total), weight, reducer, rate, find_whole(shared.anchor))


def find_whole(anchor: Updates) -> NamedSharding | None:
    """The sharding of a copy on each device of the mesh that the global parameters are on; `None`: a single device."""
    mesh = find_mesh(anchor)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def split_total(total: Updates | Polar) -> tuple[Updates, PyTree | None]:
    """The part of a total whose place the global parameters can take, and the lengths, which have none to give."""
    return (total.directions, total.lengths) if isinstance(total, Polar) else (total, None)


@partial(jax.jit, static_argnums=(0, 7), donate_argnums=2)
def step_from_total(
    method: RoundMethod,
    shared: Shared,
    total: Updates,
    lengths: PyTree | None,
    weight: Array,
    reducer: list[Array],
    rate: Array | None,
    whole: NamedSharding | None,
) -> Shared:
    """The program of `take_outer_step`.

    Sums over entries, as of a norm, are taken of whole arrays on each device, in one order on every mesh.
    """
    # Not `t / weight`: XLA multiplies by the reciprocal too where the number of workers is a constant, so that a round
    # of equal weights has the bits of `local_steps` on a mesh.
    summed = total if lengths is None else Polar(total, lengths)
    mean = jax.tree.map(lambda t: t * (1 / weight.astype(t.dtype)), summed)
    mean = from_polar(mean, whole) if isinstance(mean, Polar) else mean
    update = partial(method.outer.update, **({} if rate is None else {"learning_rate": rate}))
    given = (mean, shared.outer, shared.anchor)
    if whole is not None and combines_entries(jax.make_jaxpr(update)(*given)):
        given = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), given)
    steps, outer = update(*given)
    return Shared(optax.apply_updates(shared.anchor, steps), outer, reducer)


@partial(jax.jit, static_argnums=0)
def measure_share(method: RoundMethod, shared: Shared, drift: Updates, members: Array, rate: Array | None) -> Updates:
    """Returns how far the outer step along `Δ_w / K` alone would take the global parameters back, as a drift is."""
    extras = {} if rate is None else {"learning_rate": rate}
    share = jax.tree.map(lambda x: x * (1 / members.astype(x.dtype)), drift)
    steps, _ = method.outer.update(share, shared.outer, shared.anchor, **extras)
    return jax.tree.map(jnp.negative, steps)


@jax.jit
def rebase(anchor: Updates, params: PyTree, ahead: Updates) -> PyTree:
    """Returns the parameters of a model that is `ahead` of a new anchor by what no round has taken yet."""
    return jax.tree.map(lambda a, p, d: (round_like(a, p) - d).astype(p.dtype), anchor, params, ahead)


@jax.jit
def rebase_after(anchor: Updates, params: PyTree, before: Updates, taken: Updates) -> PyTree:
    """Returns `rebase` of what was ahead of the anchor `before`, without what a round has taken of it."""
    return rebase(anchor, params, subtract(measure_drift(before, params), taken))


@jax.jit
def restart_from(anchor: Updates, params: PyTree) -> PyTree:
    """Returns the parameters of a model of which nothing is ahead of a new anchor."""
    # A copy: steps may donate both.
    return jax.tree.map(lambda a, p: jnp.copy(a.astype(p.dtype)), anchor, params)


def strengthen(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree as steps return them: those that are made of a Python number have a weak type."""
    return jax.tree.map(lambda x: x.astype(x.dtype) if x.weak_type else x, tree)


@jax.jit
def subtract(x: Updates, y: Updates) -> Updates:
    """Returns `x - y` of two trees."""
    return jax.tree.map(jnp.subtract, x, y)


@jax.jit
def zeros_like(tree: PyTree) -> PyTree:
    """Returns a tree of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)


def _on_counts(change: Callable[..., LocalStepsState]) -> Callable[..., LocalStepsState]:
    """Compiles what changes the counts of a state, without the rest: a program returns as a copy what it leaves alone.

    With fragments, each has the inner optimizer's state of the whole model.
    """
    program = jax.jit(change)

    @wraps(change)
    def change_counts(local: LocalStepsState, *numbers: Any) -> LocalStepsState:
        rest = {name: getattr(local, name) for name in ("anchor", "outer", "inner", "reducer", "sent_from")}
        return program(local._replace(**dict.fromkeys(rest)), *numbers)._replace(**rest)

    return change_counts


@_on_counts
def restart_counts(local: LocalStepsState, number: Array) -> LocalStepsState:
    """Returns the state at the start of a round, which is also the number of rounds before it."""
    zeros = {name: jnp.zeros_like(getattr(local, name)) for name in ("since", "rates")}
    # A mark: 0 would be a round of steps without examples.
    uncounted = with_value(local.examples, jnp.full_like(local.examples.value, UNCOUNTED))
    return local._replace(rounds=jnp.full_like(local.rounds, number), examples=uncounted, **zeros)


@_on_counts
def subtract_counts(
    local: LocalStepsState, number: Array, examples: Array, steps: Array, rates: Array
) -> LocalStepsState:
    """Returns the state before round `number`, without the counts of a drift that was taken.

    So counts are those of what is ahead of the global parameters.
    """
    since = local.since - steps.astype(local.since.dtype)
    left = local.examples.value - examples.astype(local.examples.value.dtype)
    left = jnp.where((since == 0).all() | (local.examples.value == UNCOUNTED), UNCOUNTED, left)
    return local._replace(
        rounds=jnp.full_like(local.rounds, number),
        examples=with_value(local.examples, left),
        since=since,
        rates=local.rates - rates.astype(local.rates.dtype),
    )


def move_counts(local: LocalStepsState, number: Array | np.int32) -> LocalStepsState:
    """Returns the state before round `number`, with the counts of all that is ahead of the global parameters."""
    return subtract_counts(local, number, np.float32(0), np.int32(0), np.float32(0))


@_on_counts
def with_examples(local: LocalStepsState, examples: Array) -> LocalStepsState:
    """Returns the state with another number of examples of what is ahead of the global parameters."""
    return local._replace(examples=with_value(local.examples, jnp.full_like(local.examples.value, examples)))


def catch_up(
    inner: optax.GradientTransformationExtraArgs, local: LocalStepsState, steps: Array | np.int32, is_ahead: bool
) -> LocalStepsState:
    """Returns the state at a step of the run: schedules go on there, moments are its own.

    A state that is ahead counts from its start: what it has done belongs to no round of this run.
    """
    count, state = _catch_up(inner, local.count, local.inner, local.anchor, steps, is_ahead)
    return local._replace(count=count, inner=state)


@partial(jax.jit, static_argnums=(0, 5))
def _catch_up(inner: Any, count: Array, state: State, anchor: Updates, steps: Array, is_ahead: bool) -> Any:
    steps = jnp.asarray(steps, count.dtype)
    missing = steps if is_ahead else steps - count
    moved = advance_schedules(inner, unmark_inner(state, None), anchor, missing, from_start=is_ahead)
    return jnp.copy(steps), mark_inner(moved, None)


def restart_buffers(
    inner: optax.GradientTransformationExtraArgs, local: LocalStepsState, params: PyTree
) -> LocalStepsState:
    """Returns the state with the inner optimizer's moments as `init` makes them; its schedules go on."""
    return local._replace(inner=_restart_buffers(inner, local.inner, params))


@partial(jax.jit, static_argnums=0)
def _restart_buffers(inner: Any, state: State, params: PyTree) -> State:
    return mark_inner(update_inner_buffers("reset", alone(), True, inner, unmark_inner(state, None), params), None)


def needs_rate(outer: optax.GradientTransformationExtraArgs, like: PyTree) -> bool:
    """Whether the outer optimizer, which takes a learning rate, refuses to go without one, as `slow_momentum` does."""
    try:
        jax.eval_shape(lambda updates: outer.update(updates, outer.init(updates), updates), like)
    except ValueError:
        return True
    return False


class MessagePlan(NamedTuple):
    """The rounds of a reducer.

    Attributes:
      messages: shapes and dtypes of the arrays of each of its messages.
      is_mean: whether the last of them is averaged as it is, as all others are.
      renews: whether the replicated leaves of its state follow from the mean of the last message over all members, and
        not from what each member sends.
      lasts: whether a later round decodes what an island sends as its own round does: a drift may wait for its upload.
    """

    messages: list[list[jax.ShapeDtypeStruct]]
    is_mean: bool
    renews: bool
    lasts: bool

    def is_averaged(self, message: int) -> bool:
        """Whether the arrays of a message are averaged as they are."""
        return self.renews or message < len(self.messages) - 1


def mean_of(messages: Sequence[Sequence[Any]], weights: Sequence[float], like: Sequence[Any]) -> list[np.ndarray]:
    """Returns the mean of the arrays that the members of a round have sent: zeros without any weight."""
    total: Any = [np.zeros(x.shape, x.dtype) for x in like]
    for arrays, weight in zip(messages, weights, strict=True):
        total = add_arrays(total, arrays, np.float32(weight))
    return [to_host(x) for x in divide_arrays(total, np.float32(sum(weights) or 1.0))]


def compile_programs(
    method: RoundMethod,
    index: Array | np.int32,
    local: LocalStepsState,
    params: PyTree,
    *,
    plan: MessagePlan,
    needs_rate: bool,
    eager: bool,
) -> None:
    """Runs every program of the rounds of a fragment once, on arrays placed as in a meeting."""
    shared = select_shared(local)
    drift, one = measure_drift(local.anchor, params), np.float32(1)
    received: list[list[np.ndarray]] = []
    for like in plan.messages:
        arrays, *_ = encode_drift(method, index, local.anchor, params, local.reducer[0], one, received)
        received.append([to_host(x) for x in arrays])
        if plan.is_averaged(len(received) - 1):
            mean_of([received[-1]] * 2, [1.0, 1.0], like)
    *received, hosts = received
    stepped = shared
    for rate in [one] if needs_rate else [None, one]:
        total, replicated = method.begin_total(shared.anchor), shared.reducer
        for _ in range(2):  # the second member is added to what the first left
            total, replicated = add_member(method, total, hosts, one, local.reducer[0], received)
        if plan.renews:
            replicated = renew_reducer(method, shared.anchor, hosts, local.reducer[0], received)
        stepped = take_outer_step(method, shared, total, one, replicated, rate)
        if eager:
            measure_share(method, shared, drift, one, rate)
    digest_of(stepped)
    rebase(stepped.anchor, params, subtract(drift, drift))
    rebase_after(stepped.anchor, params, shared.anchor, drift)
    restart_from(stepped.anchor, params)
    restart_counts(local, np.int32(0))
    subtract_counts(local, np.int32(0), np.float32(0), np.int32(0), np.float32(0))
    with_examples(local, np.float32(0))


@jax.jit
def _hash_leaves(tree: PyTree) -> Array:
    return jnp.stack([hash_array(leaf) for leaf in jax.tree.leaves(tree)])


def digest_of(shared: Shared) -> str:
    """A short name for the bits of the shared state."""
    return hash_of(hash_leaves(shared).tobytes())


def hash_leaves(shared: Shared) -> np.ndarray:
    """Hashes of the bits of each leaf of the shared state."""
    return to_host(_hash_leaves(shared))


def to_host(x: Array) -> np.ndarray:
    """The values of an array on this process, from all of them if it is split over several."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def copy_shared_to_host(shared: Sequence[Shared]) -> list[np.ndarray]:
    """The leaves of the shared states of all fragments on this process, keys as their bits."""
    return [to_host(_bits(x)) for x in jax.tree.leaves(shared)]


def describe_shared(shared: Sequence[Shared]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what `copy_shared_to_host` returns."""
    return jax.eval_shape(lambda tree: [_bits(x) for x in jax.tree.leaves(tree)], shared)


def restore_shared(arrays: list[np.ndarray], like: Sequence[Shared]) -> list[Shared]:
    """The shared states of these arrays, placed as `like` are; it uses up the list, for less memory."""
    leaves, structure = jax.tree.flatten(like)
    assert len(arrays) == len(leaves)
    arrays.reverse()
    return structure.unflatten([_place(arrays.pop(), leaf) for leaf in leaves])


def _bits(x: Array) -> Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _place(x: np.ndarray, like: Array) -> Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return place_leaf(jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like)), like.sharding)
    return jax.device_put(x, like.sharding)


def common_leaves(state: State) -> list[Array]:
    """The leaves of a reducer's state that are replicated."""
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_mark) if not is_mark(leaf)]


def _with_replicated(state: State, replicated: Sequence[Array]) -> State:
    leaves, structure = jax.tree.flatten(state, is_leaf=is_mark)
    fresh = iter(replicated)
    return structure.unflatten([leaf if is_mark(leaf) else next(fresh) for leaf in leaves])


def check_reducer(reducer: Reducer, like: PyTree) -> MessagePlan:
    """Returns what one island sends in the rounds of a fragment.

    Raises:
      ValueError: the reducer sends no message of its own or one that is no mean before its last, or depends on fixed
        members.
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
            messages, is_mean = _trace_messages(reducer, like, state)
            mean, own, replicated = _trace_dependences(reducer, like, state, messages)
            problem = _find_disagreement(mean, own, replicated, is_mean=is_mean)
            if problem is None:
                is_shared = [not is_mark(leaf) for leaf in jax.tree.leaves(state, is_leaf=is_mark)]
                # A message that follows from earlier ones is of their rounds, even where its decoder takes nothing of
                # these.
                lasts = len(messages) == 1 and not any(mask & SHARED for mask in mean)
                return MessagePlan(messages, is_mean, is_mean and any(is_shared), lasts)
        except ValueError as error:
            problem = str(error)
    raise ValueError(f"{reducer}: {problem}; islands take {ONES_THAT_WORK}")


def _trace_messages(reducer: Reducer, like: PyTree, state: State) -> tuple[list[list[Any]], bool]:
    """The messages of a reducer, and whether the last one is a mean."""
    messages: list[list[Any]] = []
    found: list[tuple[bool, bool]] = []

    def send(drift: PyTree, state: State, received: Received) -> list[Array]:
        generator, sent = _begin(reducer, drift, state, 0, Extras(params=drift), received)
        arrays = _arrays(sent)
        found.append((not sent.gather, not isinstance(_answer(generator, sent, arrays), Messages)))
        return arrays

    while True:
        messages.append(jax.eval_shape(send, like, state, messages))
        is_mean, is_last = found[-1]
        if is_last:
            break
        if not is_mean:
            raise ValueError("this reducer gathers in a message before its last, and islands average these")
    if not any(messages):
        raise ValueError("this reducer sends nothing")
    return messages, is_mean


def _find_disagreement(mean: set[int], own: set[int], replicated: set[int], *, is_mean: bool) -> str | None:
    """Why islands would not compute the same from the same bytes, or `None`.

    Each island decodes a member with its own drift and state in place of the member's, and takes the replicated leaves
    of the reducer's state after the round from whichever member is decoded last, or from the mean of all where the
    message is one. So the mean may depend on what arrives and on what all islands have, means of earlier messages
    included; the replicated leaves on the latter alone, or on that mean; and what feedback subtracts, which is known
    before the last message arrives, on everything but that.
    """
    if any(mask & (OWN if is_mean else OWN | ARRIVED) for mask in replicated):
        return "its state follows from the drifts of the members, so that each island would fit one by itself"
    if any(mask & OWN for mask in mean):
        return "its mean follows from this island's own drift beside what arrives, so that islands would differ"
    if any(mask & ARRIVED for mask in own):
        return "what it takes of a drift follows from those of the others"
    return None


def _trace_dependences(reducer: Reducer, like: PyTree, state: State, messages: list[list[Any]]) -> list[set[int]]:
    """What the mean, what is taken of the own drift, and the replicated leaves after a round follow from."""
    leaves, structure = jax.tree.flatten(state, is_leaf=is_mark)
    *earlier, sent = messages

    def run_round(drift: PyTree, leaves: list[Any], received: Received, arrived: list[Any]) -> tuple[Any, Any, Any]:
        reduced, after = run_messages(reducer, drift, structure.unflatten(leaves), arrived, received)
        return reduced.mean, reduced.own, common_leaves(after)

    traced, shapes = jax.make_jaxpr(run_round, return_shape=True)(like, leaves, earlier, sent)
    labels = (
        [OWN] * len(jax.tree.leaves(like))
        + [OWN if is_mark(leaf) else SHARED for leaf in leaves for _ in jax.tree.leaves(leaf)]
        + [SHARED] * len(jax.tree.leaves(earlier))
        + [ARRIVED] * len(sent)
    )
    masks = jax.tree.unflatten(jax.tree.structure(shapes), propagate(traced, labels).masks)
    return [set(jax.tree.leaves(part)) for part in masks]
