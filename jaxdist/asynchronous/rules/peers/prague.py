"""The group generator of Prague: who averages with whom next, and who waits for whom meanwhile."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, no_type_check

import optax

from ...._core.types import Number
from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    SERVER,
    Actions,
    Compute,
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Send,
    Site,
    Stepped,
)
from ...values import numeric
from ..server.base import PULL, put, step_of
from .neighbors import mixed

REQUEST, DONE = "request", "done"  # to the generator
GROUP, JOIN = "group", "join"  # from it: a group that answers a request, and one on account of another's
_GROUPS = 5


class Group(NamedTuple):
    """A group of workers in increasing order, and whose request it answers; None: of all its members."""

    members: tuple[int, ...]
    asker: int | None


class GeneratorState(NamedTuple):
    """The group generator.

    Attributes:
      site: where it runs.
      made: how many groups there were ever.
      groups: those that are not done, by number.
      buffers: for each worker the numbers of its groups, in the order in which they were made. The first locks it: a
        group begins when it is the first of all its members.
      counts: how often each worker has asked.
      given: into how many groups each worker was put.
    """

    site: Site
    made: int
    groups: dict[int, Group]
    buffers: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    given: tuple[int, ...]


@no_type_check
def generator(group_size: int, groups: Literal["random", "smart"], max_lag: Number) -> Role:
    """The role of the server: it makes groups on request, and lets those that overlap run one after the other."""

    def init(site: Site, params: Any) -> tuple[GeneratorState, Actions]:
        zeros = (0,) * site.workers
        return GeneratorState(site, 0, {}, ((),) * site.workers, zeros, zeros), ()

    def begun(state: GeneratorState, number: int) -> bool:
        return all([state.buffers[member][0] == number for member in state.groups[number].members])

    def told(state: GeneratorState, number: int, worker: int) -> Send:
        members, asker = state.groups[number]
        kind = GROUP if asker is None or asker == worker else JOIN
        return Send(worker, Message(kind, None, number, bits(members)))

    def add(state: GeneratorState, group: Group) -> tuple[GeneratorState, Actions]:
        number, buffers, given = state.made, list(state.buffers), list(state.given)
        for member in group.members:
            buffers[member] = (*buffers[member], number)
            given[member] += 1
        state = state._replace(
            made=number + 1, groups=state.groups | {number: group}, buffers=tuple(buffers), given=tuple(given)
        )
        return state, begin(state, number)

    def begin(state: GeneratorState, number: int) -> Actions:
        return tuple([told(state, number, one) for one in state.groups[number].members]) if begun(state, number) else ()

    def requested(state: GeneratorState, worker: int, count: int) -> tuple[GeneratorState, Actions]:
        site = state.site
        others = [other for other in range(site.workers) if other != worker]
        if groups == "random":
            chosen = shuffled(others, group_size - 1, site.seed, state.made)
            return add(state, Group(tuple(sorted([worker, *chosen])), worker))
        state = state._replace(counts=put(state.counts, worker, count))
        if state.given[worker] >= count:
            return state, ()  # the group that answers was made before it asked
        idle = [other for other in others if not state.buffers[other] and state.counts[other] >= count - max_lag]
        actions: list = []
        for part in divided([worker, *shuffled(idle, len(idle), site.seed, state.made)], group_size):
            state, sends = add(state, Group(tuple(sorted(part)), None))
            actions.extend(sends)
        return state, tuple(actions)

    def done(state: GeneratorState, number: int) -> tuple[GeneratorState, Actions]:
        buffers, members = list(state.buffers), state.groups[number].members
        for member in members:
            buffers[member] = buffers[member][1:]
        left = {key: group for key, group in state.groups.items() if key != number}
        state = state._replace(groups=left, buffers=tuple(buffers))
        following = sorted({buffers[member][0] for member in members if buffers[member]})
        return state, tuple([send for one in following for send in begin(state, one)])

    def receive(state: GeneratorState, sender: int, message: Message) -> tuple[GeneratorState, Actions]:
        if message.kind == REQUEST:
            return requested(state, sender, message.version)
        if message.kind == DONE:
            return done(state, message.version)
        if message.kind == PULL:  # of one who was gone, and may have missed the group that it is in
            first = state.buffers[sender][:1]
            return state, tuple([told(state, number, sender) for number in first if begun(state, number)])
        raise ValueError(f"the group generator does not know the message {message.kind!r}")

    return Role(init, receive, lambda state: None)


@functools.lru_cache(maxsize=16)
def schedule(workers: int, group_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Disjoint groups that all know without asking: `[t % m][i]` is the group of worker i in iteration t.

    In iteration t workers are in the order of `(i mod s, i)`, `s = g^(t mod m)`, `g^m >= n`, and cut into groups of g:
    neighbors at first, which share a node where nodes are numbered so, and then one of each node. For `n = g^m` the
    groups of m iterations make an exact mean.
    """
    strides = [1]
    while strides[-1] * group_size < workers:
        strides.append(strides[-1] * group_size)
    plan = []
    for stride in strides:
        order = [i for first in range(min(stride, workers)) for i in range(first, workers, stride)]
        groups = [tuple(sorted(order[first : first + group_size])) for first in range(0, workers, group_size)]
        of = {worker: group for group in groups for worker in group}
        plan.append(tuple(of[worker] for worker in range(workers)))
    return tuple(plan)


def divided(workers: Sequence[int], group_size: int) -> list[Sequence[int]]:
    """Groups of nearly equal size, at most `group_size`, in this order; one that is left over stays out."""
    count = -(-len(workers) // group_size)
    each, more = divmod(len(workers), count)
    parts, first = [], 0
    for part in range(count):
        last = first + each + (part < more)
        if part == 0 or last - first > 1:
            parts.append(workers[first:last])
        first = last
    return parts


@no_type_check
def shuffled(values: list[int], length: int, seed: int, count: int) -> list[int]:
    """The first of these values in an order by chance (Fisher-Yates), the same for equal seeds and counts."""
    values = list(values)
    for place in range(min(length, len(values))):
        other = place + mixed(seed, _GROUPS, count, place) % (len(values) - place)
        values[place], values[other] = values[other], values[place]
    return values[:length]


@no_type_check
def bits(members: tuple[int, ...]) -> int:
    """A set of workers as one whole number, for a message's tag."""
    return sum([1 << member for member in members])


@no_type_check
def members_of(tag: int) -> tuple[int, ...]:
    """The workers in such a number, in increasing order."""
    out = []
    while tag:
        out.append((tag & -tag).bit_length() - 1)
        tag &= tag - 1
    return tuple(out)


Groups = Literal["random", "static", "smart"]
GROUPS = ("random", "static", "smart")
COMPUTING, ASKING, REDUCING = "computing", "asking", "reducing"


class PragueState(NamedTuple):
    """One worker of Prague.

    Attributes:
      site: where it runs.
      params, opt_state: its model, and its optimizer's state.
      steps: how many gradients it has applied.
      doing: whether it is computing, asking for a group, or reducing with one.
      group: with whom it reduces now.
      goes_on: whether it computes after that.
      held: the group that waits for it while it computes, as the generator told, or None.
      heard: the number of the last group that it was told.
    """

    site: Site
    params: Any
    opt_state: Any
    steps: int
    doing: str
    group: tuple[int, ...]
    goes_on: bool
    held: Message | None
    heard: int


def prague(
    optimizer: optax.GradientTransformation,
    *,
    group_size: int,
    groups: Groups = "smart",
    max_lag: Number = 4,
) -> Rule:
    """Each worker steps on its own model and then averages with a small group: `x_i <- 1/|G| Σ_(j in G) x_j`.

    The partial all-reduce waits for the members of the group and for nobody else. A worker computes a gradient at its
    model, applies it there, takes part in a group and goes on: as in the paper, nothing is computed while it waits.
    Groups are

    - *random*: a group generator, the server, draws one for each request. Groups that overlap run in the order in which
      they were drawn, which all members see alike, so that nobody waits in a circle. A worker is drawn into groups of
      others too, `group_size` for each gradient. Pairs are what AD-PSGD averages in;
    - *static*: disjoint groups by a schedule that all know, of neighbors at first and then ever further apart, so that
      nodes of `group_size` workers average inside and between each other in turn. Nobody asks and nothing conflicts:
      for workers of equal speed;
    - *smart*: a request for which no group was made before divides all idle workers, those that are in no group, into
      groups at once; later requests of theirs find these in their buffers. A worker that has asked more than `max_lag`
      times less often than the one that asks now is left out, so that nobody waits for it; when it asks itself, it gets
      a group of the others. For workers of unequal speed.

    Who is faster counts more where data differ between workers. What the slow one held up at the beginning stays as far
    behind, and meets it more often than others do.

    On the wire: an all-reduce of the model in a group per gradient (`group_size` of them if random), `2 (g - 1)/g`
    models each; but for *static* a request and an answer without values.

    State: each worker's model and optimizer; the generator knows groups and counts alone.

    Args:
      optimizer: what every worker steps with.
      group_size: most workers in a group. 2 mixes slowly, many wait for more; 3 or 4 to start with.
      groups: how groups are made.
      max_lag: of *smart*, in requests; infinity leaves nobody out. With few, random slowdowns split the workers.

    Returns:
      The rule. Versions in the books are a worker's own steps; the model that it would ship is the mean of all.

    Raises:
      ValueError: an argument cannot work, or groups are larger than the number of workers.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> law = durations.one_slow(durations.lognormal(1.0, 0.1), worker=0, factor=6)
      >>> for groups in ("static", "random", "smart"):
      ...     rule = rules.prague(optax.sgd(0.1), group_size=3, groups=groups)
      ...     run = replay.run(rule, durations=law, workers=6, seconds=600)
      ...     print(groups, len(run.trace.gradients))
      static 602
      random 510
      smart 2641

    References:
      Luo, He, Zhuo, Qian, "Prague: high-performance heterogeneity-aware asynchronous decentralized training", ASPLOS
      2020; as "Heterogeneity-aware asynchronous decentralized training", arXiv:1909.08029, 2019.
    """
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size}")
    if groups not in GROUPS:
        raise ValueError(f"groups must be one of {', '.join(GROUPS)}, got {groups!r}")
    if not max_lag >= 1:
        raise ValueError(f"max_lag must be at least 1, as who computes has asked once less, got {max_lag}")
    static = groups == "static"

    start = numeric(optimizer.init, shared=True)
    move = numeric(step_of(optimizer), outputs=2)

    def init(site: Site, params: Any) -> tuple[PragueState, Actions]:
        if group_size > site.workers:
            raise ValueError(f"group_size must be at most the {site.workers} workers, got {group_size}")
        state = PragueState(site, params, start(params), 0, COMPUTING, (), True, None, -1)
        return state, (Compute(params, 0),)

    @no_type_check
    def onward(state: PragueState) -> tuple[PragueState, Actions]:
        """Into the group that waits, if any."""
        held = state.held
        if held is None:
            return state, ()
        state = state._replace(doing=REDUCING, group=members_of(held.tag), goes_on=held.kind == GROUP, held=None)
        return state, (Reduce(state.group, held.version, state.params),)

    @no_type_check
    def computed(state: PragueState, gradient: Any) -> tuple[PragueState, Actions]:
        site, steps = state.site, state.steps + 1
        params, opt_state = move(state.params, state.opt_state, gradient)
        books = (Counted(site.index, steps - 1, steps - 1), Stepped(steps, steps - 1))
        state = state._replace(params=params, opt_state=opt_state, steps=steps, doing=ASKING)
        if not static:
            state, actions = onward(state)
            return state, (*books, Send(SERVER, Message(REQUEST, None, steps)), *actions)
        plan = schedule(site.workers, group_size)
        group = plan[(steps - 1) % len(plan)][site.index]
        return state._replace(doing=REDUCING, group=group), (*books, Reduce(group, steps, params))

    @no_type_check
    def reduced(state: PragueState, message: Message) -> tuple[PragueState, Actions]:
        last = state.site.index == state.group[0] and not static  # one of the group tells that it is done
        actions = (Send(SERVER, Message(DONE, None, message.tag)),) if last else ()
        if state.goes_on:
            state = state._replace(params=message.value, doing=COMPUTING, group=())
            return state, (*actions, Compute(state.params, state.steps))
        state, more = onward(state._replace(params=message.value, doing=ASKING, group=()))
        return state, (*actions, *more)

    @no_type_check
    def receive(state: PragueState, sender: int, message: Message) -> tuple[PragueState, Actions]:
        kind = message.kind
        if kind == COMPUTED:
            return computed(state, message.value)
        if kind == REDUCED:
            return reduced(state, message)
        if kind in (GROUP, JOIN):
            if message.version <= state.heard:  # told again
                return state, ()
            state = state._replace(held=message, heard=message.version)
            return onward(state) if state.doing == ASKING else (state, ())
        if kind == RECOVERED:
            again = (Compute(state.params, state.steps),) if state.doing == COMPUTING else ()
            return state, again if static else (*again, Send(SERVER, Message(PULL)))
        raise ValueError(f"a worker of prague does not know the message {kind!r}")

    def waits_for(state: PragueState) -> tuple[int, ...]:
        if state.doing == REDUCING:
            return tuple(member for member in state.group if member != state.site.index)
        return (SERVER,) if state.doing == ASKING else ()

    worker = Role(init, receive, lambda state: state.params, waits_for)
    return Rule("prague", worker, None if static else generator(group_size, groups, max_lag))
