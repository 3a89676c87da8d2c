"""Prague: workers average their models in small groups that a generator puts together."""

from typing import Any, Literal, NamedTuple, no_type_check

import optax

from ..._typing import Number
from ..rule import (
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
from ..values import numeric
from .base import PULL, step_of
from .prague_groups import DONE, GROUP, JOIN, REQUEST, generator, members_of, schedule

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
    - *static*: disjoint groups by a schedule that all know, of neighbours at first and then ever further apart, so that
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
