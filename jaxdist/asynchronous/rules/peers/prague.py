"""Prague: asynchronous decentralized SGD by partial all-reduces in small groups, made by a group generator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, no_type_check

import optax

from ...._core.checks import check_range
from ...._core.types import Number
from ... import protocol
from ...protocol import Actions, Compute, GradientRecord, Message, Reaction, Reduce, Role, Rule, Send, Site, StepRecord
from ..base import hash_words, optimizer_on_values, params_of, replace_at, unknown_message

Groups = Literal["random", "static", "smart"]
GROUPS = ("random", "static", "smart")

# Messages to the generator.
REQUEST, DONE, PULL = "request", "done", "pull"
# Messages from it: a group that answers the worker's own request, and one that was made for another's.
GROUP, JOIN = "group", "join"
# Separates these random choices from those of other rules.
_GROUP_STREAM = 5
# The phases of a worker.
COMPUTING, ASKING, REDUCING = "computing", "asking", "reducing"


class AveragingGroup(NamedTuple):
    """The members of a group, sorted, and the worker whose request it answers; None if it answers all members'."""

    members: tuple[int, ...]
    asker: int | None


class _GeneratorState(NamedTuple):
    """The state of the group generator."""

    site: Site
    # The number of groups created so far, and the unfinished ones, by number.
    created: int
    groups: dict[int, AveragingGroup]
    # For each worker the numbers of its unfinished groups, in order of creation. A group begins when it is the first in
    # the buffers of all its members.
    buffers: tuple[tuple[int, ...], ...]
    # For each worker the number of its requests, and of the groups in which it has been placed.
    requests: tuple[int, ...]
    memberships: tuple[int, ...]


class _PragueState(NamedTuple):
    """A worker's model and step count, its phase, and its groups."""

    site: Site
    params: Any
    opt_state: Any
    steps: int = 0
    phase: str = COMPUTING
    # The group of the current reduction, and whether the worker computes after it.
    group: tuple[int, ...] = ()
    continues: bool = True
    # The generator's message for a group that it has not joined yet, or None, and the number of the last group sent.
    pending: Message | None = None
    last_group: int = -1


def prague(
    optimizer: optax.GradientTransformation,
    *,
    group_size: int,
    groups: Groups = "smart",
    max_lag: Number = 4,
    node_size: int | None = None,
) -> Rule:
    """Steps each worker on its own model and then averages with a small group: `x_i <- 1/|G| Σ_(j in G) x_j`.

    A worker computes a gradient at its model, applies it, joins a group and continues; it waits for the members of its
    group only. Groups are

    - *random*: drawn for each request by a group generator, the server, of which overlapping ones run in the order in
      which they were drawn. With pairs this is the averaging of AD-PSGD;
    - *static*: disjoint, by a fixed schedule, first of neighbors and then increasingly far apart; for workers of equal
      speed;
    - *smart*: made of all idle workers at once, when a request is not answered by an earlier group, without those that
      have more than `max_lag` fewer requests; for workers of unequal speed.

    Versions in the trace are a worker's own steps; the final model is the mean of all.

    *On the wire*: an all-reduce of the model in a group per gradient (`group_size` of them if random), `2 (g - 1)/g`
    models each; except for *static*, a request and a reply without values.

    *State*: each worker's model and optimizer; the generator stores groups and counts only.

    Args:
      optimizer: the local optimizer of each worker.
      group_size: the largest number of workers in a group. 2 mixes slowly, large groups wait longer; start with 4.
      groups: the policy, see above.
      max_lag: of *smart*, in requests; infinity excludes no worker. With a small value random slowdowns split the
        workers.
      node_size: m, the number of consecutive workers of a node, which divides their number: groups of *static* and
        *smart* then follow nodes, so that few messages cross the slow links between them. None: groups ignore nodes.

    Examples:
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
      Luo, He, Zhuo, Qian, "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS,
      arXiv:1909.08029, 2020.
    """
    check_range("group_size", group_size, 2, ends="[]")
    if groups not in GROUPS:
        raise ValueError(f"groups must be one of {', '.join(GROUPS)}, got {groups!r}")
    check_range("max_lag", max_lag, 1, ends="[]")
    if node_size is not None and (node_size < 2 or groups == "random"):
        raise ValueError(
            f"node_size must be at least 2 and groups static or smart, got node_size={node_size} and groups={groups!r}"
        )
    rule = _Prague(group_size, groups, max_lag, node_size, *optimizer_on_values(optimizer))
    worker = Role(rule.init, rule.receive, params_of, _waits_for)
    # The generator has no model: the final model is the mean of the workers'.
    generator = Role(_init_generator, rule.receive_generator, lambda state: None)
    return Rule("prague", worker, None if groups == "static" else generator)


# The worker.


class _Prague(NamedTuple):
    """The arguments of `prague`; the optimizer as functions of values."""

    group_size: int
    groups: Groups
    max_lag: Number
    node_size: int | None
    start: Callable[..., Any]
    step: Callable[..., Any]

    def init(self, site: Site, params: Any) -> Reaction:
        if self.group_size > site.workers:
            raise ValueError(f"group_size must be at most the {site.workers} workers, got {self.group_size}")
        if self.node_size is not None and site.workers % self.node_size:
            raise ValueError(f"node_size must divide the {site.workers} workers, got {self.node_size}")
        return _PragueState(site, params, self.start(params)), (Compute(params, 0),)

    @no_type_check
    def receive(self, state: _PragueState, sender: int, message: Message) -> Reaction:
        kind = message.kind
        if kind == protocol.COMPUTED:
            return self._on_gradient(state, message.value)
        if kind == protocol.REDUCED:
            return self._on_mean(state, message)
        if kind in (GROUP, JOIN):
            # After an outage the generator may send a group twice.
            if message.version <= state.last_group:
                return state, ()
            state = state._replace(pending=message, last_group=message.version)
            return _try_join(state) if state.phase == ASKING else (state, ())
        if kind == protocol.RECOVERED:
            restart = (Compute(state.params, state.steps),) if state.phase == COMPUTING else ()
            return state, restart if self.groups == "static" else (*restart, Send(protocol.SERVER, Message(PULL)))
        raise unknown_message("a worker of prague", message)

    @no_type_check
    def _on_gradient(self, state: _PragueState, gradient: Any) -> Reaction:
        site, steps = state.site, state.steps + 1
        # As in the paper the gradient is applied before the worker joins a group.
        params, opt_state = self.step(state.params, state.opt_state, gradient)
        records = GradientRecord(site.index, steps - 1, steps - 1), StepRecord(steps, steps - 1)
        state = state._replace(params=params, opt_state=opt_state, steps=steps, phase=ASKING)
        if self.groups == "static":
            plan = node_schedule(site.workers, self.group_size, self.node_size or site.workers)
            group = plan[(steps - 1) % len(plan)][site.index]
            return state._replace(phase=REDUCING, group=group), (*records, Reduce(group, steps, params))
        state, actions = _try_join(state)
        return state, (*records, Send(protocol.SERVER, Message(REQUEST, None, steps)), *actions)

    @no_type_check
    def _on_mean(self, state: _PragueState, message: Message) -> Reaction:
        # The first member reports to the generator that the group is done.
        reports = state.site.index == state.group[0] and self.groups != "static"
        report = (Send(protocol.SERVER, Message(DONE, None, message.tag)),) if reports else ()
        # x_i <- 1/|G| Σ_(j in G) x_j
        state = state._replace(params=message.value, group=())
        if state.continues:
            return state._replace(phase=COMPUTING), (*report, Compute(state.params, state.steps))
        state, actions = _try_join(state._replace(phase=ASKING))
        return state, (*report, *actions)

    @no_type_check
    def receive_generator(self, state: _GeneratorState, sender: int, message: Message) -> Reaction:
        if message.kind == REQUEST and self.groups == "smart":
            return self._on_smart_request(state, sender, message.version)
        if message.kind == REQUEST:
            others = [other for other in range(state.site.workers) if other != sender]
            drawn = shuffle(others, self.group_size - 1, state.site.seed, state.created)
            return _add_group(state, AveragingGroup(tuple(sorted([sender, *drawn])), sender))
        if message.kind == DONE:
            return _on_done(state, message.version)
        if message.kind == PULL:
            # The worker was down, and may have missed the message of the group that it is in.
            first = state.buffers[sender][:1]
            return state, tuple([_notify(state, number, sender) for number in first if _has_begun(state, number)])
        raise unknown_message("the group generator", message)

    @no_type_check
    def _on_smart_request(self, state: _GeneratorState, worker: int, count: int) -> Reaction:
        site, requests = state.site, replace_at(state.requests, worker, count)
        state = state._replace(requests=requests)
        # The group that answers was created for an earlier request of another worker.
        if state.memberships[worker] >= count:
            return state, ()
        # Workers in no group; those with far fewer requests are slow, and would be waited for.
        candidates = [i for i in range(site.workers) if i != worker and not state.buffers[i]]
        idle = [i for i in candidates if requests[i] >= count - self.max_lag]
        actions: list = []
        order = [worker, *shuffle(idle, len(idle), site.seed, state.created)]
        if self.node_size is None:
            parts = divide(order, self.group_size)
        else:
            parts = divide_nodes(order, self.group_size, self.node_size)
        for members in parts:
            state, sends = _add_group(state, AveragingGroup(tuple(sorted(members)), None))
            actions.extend(sends)
        return state, tuple(actions)


@no_type_check
def _try_join(state: _PragueState) -> Reaction:
    """Joins the pending group, if there is one."""
    pending = state.pending
    if pending is None:
        return state, ()
    group, continues = decode_members(pending.tag), pending.kind == GROUP
    state = state._replace(phase=REDUCING, group=group, continues=continues, pending=None)
    return state, (Reduce(group, pending.version, state.params),)


def _waits_for(state: _PragueState) -> tuple[int, ...]:
    if state.phase == REDUCING:
        return tuple(member for member in state.group if member != state.site.index)
    return (protocol.SERVER,) if state.phase == ASKING else ()


# The group generator.


def _init_generator(site: Site, params: Any) -> Reaction:
    zeros = (0,) * site.workers
    return _GeneratorState(site, 0, {}, ((),) * site.workers, zeros, zeros), ()


@no_type_check
def _on_done(state: _GeneratorState, number: int) -> Reaction:
    buffers, members = list(state.buffers), state.groups[number].members
    for member in members:
        buffers[member] = buffers[member][1:]
    groups = {key: group for key, group in state.groups.items() if key != number}
    state = state._replace(groups=groups, buffers=tuple(buffers))
    # The next group in the buffer of a member may have waited for this one.
    following = sorted({buffers[member][0] for member in members if buffers[member]})
    return state, tuple([send for waiting in following for send in _try_begin(state, waiting)])


@no_type_check
def _add_group(state: _GeneratorState, group: AveragingGroup) -> Reaction:
    number, buffers, memberships = state.created, list(state.buffers), list(state.memberships)
    for member in group.members:
        buffers[member] = (*buffers[member], number)
        memberships[member] += 1
    groups = state.groups | {number: group}
    state = _GeneratorState(state.site, number + 1, groups, tuple(buffers), state.requests, tuple(memberships))
    return state, _try_begin(state, number)


@no_type_check
def _try_begin(state: _GeneratorState, number: int) -> Actions:
    """Notifies the members of a group if none of them is in an earlier unfinished group."""
    if not _has_begun(state, number):
        return ()
    return tuple([_notify(state, number, member) for member in state.groups[number].members])


@no_type_check
def _has_begun(state: _GeneratorState, number: int) -> bool:
    return all([state.buffers[member][0] == number for member in state.groups[number].members])


@no_type_check
def _notify(state: _GeneratorState, number: int, worker: int) -> Send:
    members, asker = state.groups[number]
    kind = GROUP if asker is None or asker == worker else JOIN
    return Send(worker, Message(kind, None, number, encode_members(members)))


# Groups.


@functools.lru_cache(maxsize=16)
def static_schedule(workers: int, group_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the disjoint groups of the static policy: `[t % m][i]` is the group of worker i in iteration t.

    In iteration t workers are sorted by `(i mod s, i)`, `s = g^(t mod m)`, `g^m >= n`, and split into groups of g: at
    first neighbors, which share a node if nodes have consecutive workers, then one worker of each node. For `n = g^m`
    the groups of m iterations compute an exact mean.
    """
    strides = [1]
    while strides[-1] * group_size < workers:
        strides.append(strides[-1] * group_size)
    plan = []
    for stride in strides:
        order = [i for first in range(min(stride, workers)) for i in range(first, workers, stride)]
        groups = [tuple(sorted(order[first : first + group_size])) for first in range(0, workers, group_size)]
        group_of = {worker: group for group in groups for worker in group}
        plan.append(tuple(group_of[worker] for worker in range(workers)))
    return tuple(plan)


@functools.lru_cache(maxsize=16)
def node_schedule(workers: int, group_size: int, node_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the static policy for nodes of m consecutive workers: `static_schedule` inside nodes, then across them.

    Across nodes, workers of equal place in their nodes form groups. With a single node it is `static_schedule`.
    """
    nodes, plan = workers // node_size, []
    for groups in static_schedule(node_size, group_size):
        plan.append(
            tuple(tuple(first + j for j in group) for first in range(0, workers, node_size) for group in groups)
        )
    for groups in static_schedule(nodes, group_size) if nodes > 1 else ():
        plan.append(
            tuple(tuple(node * node_size + k for node in groups[i]) for i in range(nodes) for k in range(node_size))
        )
    return tuple(plan)


def divide_nodes(workers: Sequence[int], group_size: int, node_size: int) -> list[Sequence[int]]:
    """Divides workers twice: groups across nodes of their first workers and inside of the others, then inside of all.

    The first worker is in at least one group; groups of one are dropped otherwise.
    """
    inside: dict[int, list[int]] = {}
    for worker in workers:
        inside.setdefault(worker // node_size, []).append(worker)
    # The first of each node crosses; the worker that asked is the first of all.
    parts = divide([members[0] for members in inside.values()], group_size)
    for members in [*(members[1:] for members in inside.values()), *inside.values()]:
        parts += divide(members, group_size) if len(members) > 1 else []
    first, *rest = parts
    return [first, *rest] if len(first) > 1 or not any(workers[0] in part for part in rest) else rest


def divide(workers: Sequence[int], group_size: int) -> list[Sequence[int]]:
    """Divides workers into groups of nearly equal size, at most `group_size`, in order; drops later groups of one."""
    # The least number of groups, then sizes that differ by at most one.
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
def shuffle(values: list[int], length: int, seed: int, count: int) -> list[int]:
    """Returns the first values of a random order (Fisher-Yates) that depends on seed and count only."""
    values = list(values)
    for place in range(min(length, len(values))):
        other = place + hash_words(seed, _GROUP_STREAM, count, place) % (len(values) - place)
        values[place], values[other] = values[other], values[place]
    return values[:length]


@no_type_check
def encode_members(members: tuple[int, ...]) -> int:
    """Encodes a set of workers as the bits of an integer, for a message's tag."""
    return sum([1 << member for member in members])


@no_type_check
def decode_members(tag: int) -> tuple[int, ...]:
    """Returns the workers in a tag, in increasing order."""
    members = []
    while tag:
        members.append((tag & -tag).bit_length() - 1)
        tag &= tag - 1
    return tuple(members)
