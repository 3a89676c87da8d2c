"""The group generator of Prague: who averages with whom next, and who waits for whom meanwhile."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, no_type_check

from ..._typing import Number
from ..rule import Actions, Message, Role, Send, Site
from ._chance import mixed
from .base import PULL, put

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
    neighbours at first, which share a node where nodes are numbered so, and then one of each node. For `n = g^m` the
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
