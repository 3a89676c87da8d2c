"""Predicts how much of the chips' time becomes training progress when chips fail and slices are taken away.

A `Fleet` says what fails, how often and how long recovery takes, a `Scheme` what they stop: `synchronous`,
`elastic` or `islands`. `simulate` plays the failures on a clock, `estimate` has the closed form. Both are NumPy, and
compile nothing.

The failures of chips are independent Poisson processes, so those of a whole fleet are one process with the sum of the
rates, and which slice is hit is drawn afterwards. The cost of a simulation is thus that of its failures, whatever the
number of chips.
"""

import heapq
import math
from typing import Literal, NamedTuple

import numpy as np

from .._core.checks import check_count, check_range
from .._core.types import Number

# Failures during the longest absence, which are drawn before the start of a simulation.
MOST_AWAY = 5e6


class Fleet(NamedTuple):
    """The chips of a run and their failures; made by `fleet`, which describes the fields. All times are in seconds."""

    chips: int
    mtbf: float
    slice_chips: int
    detect: float
    restart: float
    reload: float
    repair: float
    save: float
    interval: float | None
    step: float
    preemption: float
    outage: float

    @property
    def slices(self) -> int:
        """The slices of the fleet."""
        return self.chips // self.slice_chips

    @property
    def slice_rate(self) -> float:
        """The failures and preemptions of one slice in a second."""
        return self.slice_chips / self.mtbf + 1 / self.preemption

    @property
    def mean_absence(self) -> float:
        """The mean seconds for which a slice is away after a failure or a preemption."""
        if not self.slice_rate:
            return 0.0
        return (self.slice_chips / self.mtbf * self.repair + self.outage / self.preemption) / self.slice_rate


class Scheme(NamedTuple):
    """What stops when a slice fails; made by `synchronous`, `elastic` and `islands`.

    Attributes:
      kind: what a group of slices does that loses one: it waits for the slice or a spare one (`"fixed"`), restarts on
        what is left (`"restart"`), or goes on with what is left (`"shrink"`).
      spares: the slices that a fixed group keeps idle.
      resize: seconds of shrinking and of growing.
      groups: the groups of slices that fail and recover each by itself.
      period: `H`, the steps of a round between groups.
      fragments: the parts of the model that are exchanged at different steps of a round.
      overlap: the steps of computation during which an exchange may run.
      quorum: the least number of groups that are up for a round to end.
      grace: seconds for which an exchange waits for a group that has stopped.
      message_bytes: what a group sends in a round, all fragments together.
      bandwidth: of a group, in bytes a second.
    """

    kind: Literal["fixed", "restart", "shrink"]
    spares: int = 0
    resize: float = 0.0
    groups: int = 1
    period: int = 1
    fragments: int = 1
    overlap: int = 0
    quorum: int = 1
    grace: float = 0.0
    message_bytes: float = 0.0
    bandwidth: float = math.inf


class Goodput(NamedTuple):
    """Where the time of the chips goes: shares of chips × seconds, which add up to 1, beside two that do not.

    Attributes:
      goodput: computation that is part of the model in the end.
      redone: computation that a failure undid, since it was after the last checkpoint or exchange.
      saving: pauses for checkpoints and for exchanges that computation does not hide.
      stopped: chips that work, in a group that is stopped to detect, restart, reload or resize.
      waiting: groups that wait for a quorum or in the grace window.
      absent: slices that are away, and spare ones.
      availability: the share of the seconds, not of chips × seconds, in which at least `quorum` groups train. What they
        compute may be undone later, and most chips may be idle; so it is at least the goodput.
      failures: failures and preemptions a day that stop a group.
      exchanges: exchanges of a fragment a day, of all groups; 0 for a single one.
      days: the simulated days.
    """

    goodput: float
    redone: float
    saving: float
    stopped: float
    waiting: float
    absent: float
    availability: float
    failures: float
    exchanges: float
    days: float


class Bill(NamedTuple):
    """What a run produces and costs.

    Attributes:
      tokens_per_hour: tokens that are part of the model in the end.
      dollars_per_hour: the chips, working or not, and the bytes that leave the groups.
      dollars_per_billion_tokens: infinite where no token is left.
    """

    tokens_per_hour: float
    dollars_per_hour: float
    dollars_per_billion_tokens: float


def fleet(
    chips: int,
    *,
    mtbf: Number,
    slice_chips: int = 1,
    detect: Number = 30.0,
    restart: Number = 120.0,
    reload: Number = 60.0,
    repair: Number = 0.0,
    save: Number = 10.0,
    interval: Number | None = None,
    step: Number = 1.0,
    preemption: Number = math.inf,
    outage: Number = 0.0,
) -> Fleet:
    """Describes the chips of a run and their failures.

    A failed chip takes its whole slice out of the run. The failures of a chip, and the preemptions of a slice, are
    Poisson processes. All times are in seconds.

    Args:
      chips: all that are paid for, a multiple of `slice_chips`.
      mtbf: mean time between the failures of one chip: 3.2e7 is a year. Llama 3 had 419 unexpected interruptions in 54
        days on 16,384 GPUs, one in 5.8 years of a GPU (Grattafiori et al., 2024).
      slice_chips: the chips of a slice, or of a machine: what fails together.
      detect: from a failure until all chips of the group have stopped.
      restart: to place, start and compile the program again. Further failures before its end are part of the same stop.
      reload: to read a checkpoint. A failure during it begins a new stop.
      repair: until the slice of a failed chip is back; 0 if another one takes its place at once.
      save: for which training pauses to write a checkpoint.
      interval: seconds of computation between checkpoints; None is the best one, of `checkpoint_interval`.
      step: seconds of a training step of the whole fleet.
      preemption: mean time between the preemptions of one slice.
      outage: for which a preempted slice is away.

    Raises:
      ValueError: for a number out of its range.

    Examples:
      >>> from jaxdist.analysis import goodput
      >>> goodput.fleet(16_384, mtbf=3.2e7, slice_chips=8).slices
      2048
    """
    check_count("chips", chips, 1)
    check_count("slice_chips", slice_chips, 1)
    if chips % slice_chips:
        near = max(1, round(chips / slice_chips)) * slice_chips
        raise ValueError(f"chips must be a multiple of slice_chips={slice_chips}, got {chips}; {near} is one")
    for name, value in (("mtbf", mtbf), ("preemption", preemption)):
        check_range(name, value, 0, ends="(]")
    check_range("step", step, 0, ends="()")
    if interval is not None:
        check_range("interval", interval, 0, ends="()")
    times = {"detect": detect, "restart": restart, "reload": reload, "repair": repair, "save": save, "outage": outage}
    for name, value in times.items():
        check_range(name, value, 0)
    values = (mtbf, slice_chips, detect, restart, reload, repair, save, interval, step, preemption, outage)
    return Fleet(chips, *values)


def synchronous(*, spares: int = 0) -> Scheme:
    """Plain data parallelism: every failure stops all chips, and all go back to the last checkpoint.

    The run goes on as soon as all slices are there that it started with, so it waits for `repair` and `outage` unless a
    spare slice takes the place of the one that is away.

    Args:
      spares: slices that are paid for and idle until another one fails. Too few stop the run often, too many are a
        waste: somewhat more are right than are away on average, `slices · slice_rate · mean_absence`.

    Raises:
      ValueError: for a negative number.
    """
    check_count("spares", spares, 0)
    return Scheme("fixed", spares)


def elastic(*, resize: Number | None = None) -> Scheme:
    """Elastic data parallelism: every failure stops all chips, and the run goes on with the slices that are left.

    A slice that comes back stops the run once more, to grow. With the same global batch on fewer slices a step takes
    longer, with a smaller one it has fewer tokens: progress is proportional to the slices either way.

    Args:
      resize: None restarts all processes from the last checkpoint, with `restart` and `reload` for each change, and
        saves before it grows. Seconds keep the processes and what they hold: a change takes `resize`, and only the step
        is lost that was under way. The last slice of a group cannot be lost like this, and restarts.

    Raises:
      ValueError: for a negative time.
    """
    if resize is None:
        return Scheme("restart")
    check_range("resize", resize, 0)
    return Scheme("shrink", resize=resize)


def islands(
    count: int,
    *,
    period: int,
    fragments: int = 1,
    overlap: int = 0,
    quorum: int = 1,
    grace: Number = 0.0,
    message_bytes: Number = 0.0,
    bandwidth: Number = math.inf,
    inner: Scheme | None = None,
) -> Scheme:
    """Groups of slices that train alone, merge their models every `period` steps, and fail each by itself.

    A group that starts again takes the model of the others, without a checkpoint of its own, and loses what it has not
    merged: half a round on average, whatever the number of fragments. One island is `inner`, with its checkpoints.

    Args:
      count: the number of islands, of equal size up to one slice.
      period: `H`, the steps of a round. A longer one sends less and loses more in a failure.
      fragments: `P`: parts of the model that are exchanged at `P` different steps of a round.
      overlap: the steps during which the exchange of a fragment may run; without, training waits for its end. More
        than `period / fragments` hide no more, since the exchanges of several fragments share the link then.
      quorum: while fewer islands are up than this, no round ends and the others wait.
      grace: seconds for which the next exchange waits for an island that has stopped; `overlap` hides some of them.
      message_bytes: what an island sends in a round, all fragments together.
      bandwidth: of an island, in bytes a second.
      inner: what an island does when it loses a slice; by default `synchronous()`.

    Raises:
      ValueError: for a number out of its range, or islands of islands.

    References:
      Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428, 2026.
    """
    inner = synchronous() if inner is None else inner
    for name, value in (("count", count), ("period", period), ("fragments", fragments), ("quorum", quorum)):
        check_count(name, value, 1)
    check_count("overlap", overlap, 0)
    if quorum > count:
        raise ValueError(f"quorum must be at most the number of islands, {count}, got {quorum}")
    if fragments > period:
        raise ValueError(f"fragments must be at most period={period}, got {fragments}: each has a step of its own")
    if overlap > period:
        raise ValueError(f"overlap must be at most period={period} steps, got {overlap}")
    if inner.groups > 1:
        raise ValueError(f"inner must be synchronous() or elastic(), got {inner.groups} islands")
    check_range("grace", grace, 0)
    check_range("message_bytes", message_bytes, 0)
    check_range("bandwidth", bandwidth, 0, ends="(]")
    return inner._replace(
        groups=count,
        period=period,
        fragments=fragments,
        overlap=overlap,
        quorum=quorum,
        grace=grace,
        message_bytes=message_bytes,
        bandwidth=bandwidth,
    )


def checkpoint_interval(save: Number, mtbf: Number) -> float:
    """Returns the seconds of computation between two checkpoints that lose the least time.

    `sqrt(2 δ M) (1 + sqrt(δ / 2M) / 3 + δ / 18M) - δ` with `δ` the seconds of a checkpoint and `M` the mean time
    between failures, or `M` if `δ ≥ 2M`. Young's `sqrt(2 δ M)` is the first term.

    Args:
      save: seconds for which training pauses to write one.
      mtbf: mean seconds between the failures of all chips that stop together, not of one.

    Raises:
      ValueError: for a negative time, or a mean time that is not positive.

    Examples:
      >>> from jaxdist.analysis import goodput
      >>> round(goodput.checkpoint_interval(10.0, 3600.0))  # Young: 268
      262

    References:
      Young, "A First Order Approximation to the Optimum Checkpoint Interval", CACM 17(9), 1974. Daly, "A Higher Order
      Estimate of the Optimum Checkpoint Interval for Restart Dumps", FGCS 22(3), 2006.
    """
    check_range("save", save, 0)
    check_range("mtbf", mtbf, 0, ends="(]")
    if math.isinf(mtbf):
        return math.inf if save else 0.0
    if save >= 2 * mtbf:
        return float(mtbf)
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


class _Group(NamedTuple):
    """The slices of one group, what it does when it loses some, and its times in seconds."""

    slices: int
    spares: int
    kind: Literal["fixed", "restart", "shrink"]
    cycle: float  # of computation between two pauses
    pause: float
    fragments: int  # the cycles of a round
    save: float  # before it grows
    resize: float

    @property
    def need(self) -> int:
        """The slices without which it stops."""
        return self.slices - self.spares if self.kind == "fixed" else 1


def _group(fleet: Fleet, scheme: Scheme, slices: int) -> _Group:
    """The group of so many slices, with checkpoints if it is the only one, else with exchanges."""
    if scheme.groups > 1:
        transfer = scheme.message_bytes / scheme.fragments / scheme.bandwidth
        cycle, fragments = scheme.period * fleet.step / scheme.fragments, scheme.fragments
        # Exchanges that run at the same time share the link.
        pause = max(0.0, transfer - min(scheme.overlap * fleet.step, cycle))
    else:
        rate = (slices - scheme.spares) * fleet.slice_rate
        best = checkpoint_interval(fleet.save, 1 / rate if rate else math.inf)
        cycle = max(fleet.step, best) if fleet.interval is None else fleet.interval
        fragments, pause = 1, 0.0 if math.isinf(cycle) else fleet.save
    return _Group(slices, scheme.spares, scheme.kind, cycle, pause, fragments, fleet.save, scheme.resize)


def _groups(fleet: Fleet, scheme: Scheme) -> list[_Group]:
    """The groups of a scheme, of equal size up to one slice."""
    slices, groups = fleet.slices, scheme.groups
    if slices < groups:
        raise ValueError(f"{groups} islands need as many slices, got {slices}: use fewer islands, or smaller slices")
    least = slices // groups
    if scheme.spares >= least:
        raise ValueError(f"spares must be fewer than the {least} slices of a group, got {scheme.spares}")
    return [_group(fleet, scheme, slices * (g + 1) // groups - slices * g // groups) for g in range(groups)]


class _Replay:
    """The clock of one group.

    A stop has a part until `ready`, in which further failures only take slices away, and the reload until `begin`, in
    which they begin another stop. Until enough slices are there, both are infinite.
    """

    def __init__(self, fleet: Fleet, group: _Group, seed: tuple[int, int], horizon: float) -> None:
        self.fleet, self.group, self.horizon = fleet, group, horizon
        # Seconds, each times the share of the slices that work.
        self.kept = self.redone = self.saving = self.stopped = 0.0
        self.failures, self.exchanges = 0, 0.0
        # Of each stop, to see how many groups are up at a time.
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.now = self.ready = self.begin = 0.0
        # The end of the restart if no slice has to be waited for.
        self.earliest = 0.0
        # Since the last rollback: cycles, seconds within the present one, and computation.
        self.cycles, self.place, self.progress = 0, 0.0, 0.0
        # When slices that are away come back.
        self.back: list[float] = []
        self._play(*_draw(fleet, group.slices, seed, horizon))

    @property
    def _present(self) -> int:
        return self.group.slices - len(self.back)

    @property
    def _working(self) -> int:
        return min(self._present, self.group.slices - self.group.spares)

    def _play(self, times: list[float], places: list[float], absences: list[float]) -> None:
        n = self._skip(times, places, absences)
        if self._present < self.group.need:
            self.starts.append(0.0)
            self.ready = self.begin = math.inf
        while self.now < self.horizon:
            returns = self.back[0] if self.back else math.inf
            self._advance(min(returns, times[n], self.horizon))
            if self.now >= self.horizon:
                break
            if returns <= times[n]:
                heapq.heappop(self.back)
                self._grow()
            else:
                self._hit(places[n], absences[n])
                n += 1
        if len(self.ends) < len(self.starts):
            self.ends.append(min(self.begin, self.horizon))

    def _skip(self, times: list[float], places: list[float], absences: list[float]) -> int:
        """Takes those slices away that are still away at the start, and returns the number of failures before it."""
        n = 0
        while times[n] < 0:
            self._return_until(times[n])
            if absences[n] and places[n] * self.group.slices >= len(self.back):
                heapq.heappush(self.back, times[n] + absences[n])
            n += 1
        self._return_until(0.0)
        return n

    def _return_until(self, time: float) -> None:
        while self.back and self.back[0] <= time:
            heapq.heappop(self.back)

    def _hit(self, place: float, absence: float) -> None:
        """Fails one of the slices, all alike."""
        # The first places are those of slices that are away already, the last ones those of spare slices, which idle.
        number, working = int(place * self.group.slices) - len(self.back), self._working
        if number >= 0:
            if absence:
                heapq.heappush(self.back, self.now + absence)
            if number < working:
                self._fail(working)

    def _advance(self, to: float) -> None:
        """Waits until `begin`, and computes from then on."""
        share = self._working / self.group.slices
        if self.begin > self.now:
            self.stopped += share * (min(to, self.begin) - self.now)
        seconds = to - max(self.now, self.begin)
        self.now = to
        if seconds <= 0:
            return
        cycle, whole = self.group.cycle, self.group.cycle + self.group.pause
        end, computed = self.place + seconds, -min(self.place, cycle)
        if end >= whole:
            cycles = int(end // whole)
            self.cycles += cycles
            computed += cycles * cycle
            end -= cycles * whole
        computed += min(end, cycle)
        self.place = end
        self.exchanges += computed / cycle
        self.kept += share * computed
        self.progress += share * computed
        self.saving += share * (seconds - computed)

    def _fail(self, working: int) -> None:
        """Loses one of the slices that work, or a chip of it."""
        fleet, group = self.fleet, self.group
        enough = self._present >= group.need
        if self.now < self.ready:
            # Part of the present stop.
            if not enough and math.isfinite(self.ready):
                self._roll_back(working)
                self.ready = self.begin = math.inf
            return
        self.failures += 1
        self._stop()
        if group.kind == "shrink" and working > 1:
            # The others keep what they hold, up to the step that was under way.
            part = min(self.place, group.cycle)
            lost = min(part, math.fmod(self.cycles * group.cycle + part, fleet.step))
            self.place = part - lost
            self._lose(lost * working / group.slices)
            self.ready = self.begin = self.now + fleet.detect + group.resize
            return
        self._roll_back(working)
        self.earliest = self.now + fleet.detect + fleet.restart
        self.ready = self.earliest if enough else math.inf
        self.begin = self.ready + fleet.reload

    def _grow(self) -> None:
        """Takes in a slice that is back."""
        fleet, group = self.fleet, self.group
        if math.isinf(self.ready):
            if self._present >= group.need:
                self.ready = max(self.earliest, self.now + fleet.restart)
                self.begin = self.ready + fleet.reload
        elif group.kind != "fixed" and self.now >= self.ready:
            self._stop()
            if group.kind == "shrink":
                self.ready = self.begin = self.now + group.resize
                return
            # Saved first, so nothing is lost.
            self.cycles, self.place, self.progress = 0, 0.0, 0.0
            self.ready = self.now + group.save + fleet.restart
            self.begin = self.ready + fleet.reload

    def _stop(self) -> None:
        """Begins a stop, or goes on with one during its reload."""
        if self.now >= self.begin:
            if self.starts:
                self.ends.append(self.begin)
            self.starts.append(self.now)

    def _roll_back(self, working: int) -> None:
        lost = _lost_work(self.group, self.cycles, min(self.place, self.group.cycle))
        self._lose(lost * working / self.group.slices)
        self.cycles, self.place, self.progress = 0, 0.0, 0.0

    def _lose(self, computation: float) -> None:
        # The share of slices may have changed since then.
        lost = min(computation, self.progress)
        self.kept, self.redone, self.progress = self.kept - lost, self.redone + lost, self.progress - lost


def _draw(fleet: Fleet, slices: int, seed: tuple[int, int], horizon: float) -> tuple[list[float], ...]:
    """The times of all failures, their places in [0, 1) among the slices, and for how long each takes a slice away.

    They begin so long before the start at 0 that as many slices are away then as in the long run.
    """
    rng = np.random.default_rng(seed)
    before = max(fleet.repair, fleet.outage)
    number = rng.poisson(slices * fleet.slice_rate * (before + horizon))
    times = np.sort(rng.uniform(-before, horizon, number))
    places, kinds = rng.uniform(size=(2, number))
    absences = np.where(kinds * fleet.slice_rate * fleet.preemption < 1, fleet.outage, fleet.repair)
    return [*times.tolist(), math.inf], places.tolist(), absences.tolist()


def _lost_work(group: _Group, cycles: int, part: float) -> float:
    """Seconds of computation that a failure undoes, `cycles` cycles and `part` seconds after a start.

    At the end of each cycle one of `P` fragments is merged, in turn: what is lost is the mean over the fragments of the
    time since then.
    """
    cycle, fragments = group.cycle, group.fragments
    rounds, merged = divmod(cycles, fragments)
    since = merged * cycle + part
    if not rounds:
        # Since the start, for those that were never merged.
        return since - cycle * merged * (merged + 1) / (2 * fragments)
    return since + cycle * (fragments - merged) - cycle * (fragments + 1) / 2


def simulate(fleet: Fleet, scheme: Scheme, *, seed: int = 0, failures: int = 20_000) -> Goodput:
    """Plays the failures of a fleet on a clock, and adds up where the time of its chips goes.

    Groups fail and recover each by itself. Afterwards the groups that are up are counted at each time: while they are
    fewer than the quorum, they wait, and each stop makes the others wait for the grace window once, or for its end if
    that is earlier. Left out: stragglers, links that fail, and the loss of tokens in a smaller batch.

    Args:
      fleet: the chips and their failures.
      scheme: what a failure stops.
      seed: the same one gives the same failures.
      failures: the mean number that is simulated, of all slices, which sets the simulated days. More are more exact:
        the relative error of the lost share is about `1 / sqrt(failures)`.

    Returns:
      the shares of the time.

    Raises:
      ValueError: for fewer slices than groups or spares, or a number out of its range.

    Examples:
      >>> from jaxdist.analysis import goodput
      >>> fleet = goodput.fleet(16_384, mtbf=1.8e8, slice_chips=8)
      >>> found = goodput.simulate(fleet, goodput.synchronous(), failures=2000)
      >>> print(f"{found.goodput:.2f} {found.availability:.2f} {found.failures:.1f} failures a day")
      0.94 0.98 7.8 failures a day
    """
    check_count("seed", seed, 0)
    check_count("failures", failures, 1)
    groups = _groups(fleet, scheme)
    rate = fleet.slices * fleet.slice_rate
    away = rate * max(fleet.repair, fleet.outage)
    if away > MOST_AWAY:
        raise ValueError(
            f"{away:.2g} failures during the longest repair or outage are more than the {MOST_AWAY:.0g} that can be "
            "simulated: no slice would be there; check mtbf, preemption, repair and outage"
        )
    # Without failures a round is as good as many.
    first = groups[0]
    calm = first.fragments * (first.cycle + first.pause)
    horizon = failures / rate if rate else calm if math.isfinite(calm) else fleet.step
    played = [_Replay(fleet, group, (seed, number), horizon) for number, group in enumerate(groups)]
    weights = [group.slices / fleet.slices / horizon for group in groups]
    kept, redone, saving, stopped = (
        math.fsum(weight * getattr(each, name) for weight, each in zip(weights, played, strict=True))
        for name in ("kept", "redone", "saving", "stopped")
    )
    availability, waits = _count_groups(fleet, scheme, played, horizon)
    busy = kept + redone + saving
    exchanges = math.fsum(each.exchanges for each in played) if scheme.groups > 1 else 0.0
    days = horizon / 86400
    return Goodput(
        goodput=kept * (1 - waits),
        redone=redone * (1 - waits),
        saving=max(0.0, saving) * (1 - waits),
        stopped=stopped,
        waiting=busy * waits,
        absent=max(0.0, 1 - busy - stopped),
        availability=availability,
        failures=sum(each.failures for each in played) / days,
        exchanges=exchanges * (1 - waits) / days,
        days=days,
    )


def _count_groups(fleet: Fleet, scheme: Scheme, played: list[_Replay], horizon: float) -> tuple[float, float]:
    """The share of time with a quorum of groups, and the share of their time that groups wait for others."""
    starts = np.array([time for each in played for time in each.starts])
    ends = np.minimum([time for each in played for time in each.ends], horizon)
    times = np.concatenate([[0.0], starts, ends, [horizon]])
    changes = np.concatenate([[0], np.full(starts.size, -1), np.full(starts.size, 1), [0]])
    order = np.argsort(times, kind="stable")
    up = scheme.groups + np.cumsum(changes[order])[:-1]
    seconds = np.diff(times[order])
    enough = up >= scheme.quorum
    busy = float(up @ seconds)
    if not busy:
        return 0.0, 0.0
    # `up` after each start, in the order of `starts`.
    others = up[np.argsort(order)[1 : starts.size + 1]]
    beyond = max(0.0, scheme.grace - scheme.overlap * fleet.step)
    graces = float(others @ np.minimum(beyond, ends - starts))
    return float(seconds[enough].sum() / horizon), min(1.0, (float((up * ~enough) @ seconds) + graces) / busy)


def estimate(fleet: Fleet, scheme: Scheme) -> float:
    """Returns the goodput in closed form.

    With `Λ` the failures of a group in a second, `τ` and `δ` the seconds of computation and pause of a cycle, `D` those
    of detection and restart and `R` those of the reload, a group that waits for all its slices has

    `Λ τ exp(-Λ R) / ((1 + Λ D) (exp(Λ (τ + δ)) - 1))`,

    Daly's model for `D = 0`, times the share of its slices that are no spares and the probability that no more are away
    than there are spares. A group that shrinks has `1 / (1 + Λ (detect + 2 resize))`, times the shares of slices that
    are there, of cycles without their pause, and of steps that no failure undoes. Islands are groups of their size,
    times the shares that quorum and grace leave.

    It is exact for a single group that never waits for a slice. Else it is an approximation: failures that fall into a
    wait for slices are counted as if they were alone.

    Args:
      fleet: the chips and their failures.
      scheme: what a failure stops.

    Raises:
      ValueError: as for `simulate`.

    Examples:
      >>> from jaxdist.analysis import goodput
      >>> fleet = goodput.fleet(16_384, mtbf=1.8e8, slice_chips=8)
      >>> round(goodput.estimate(fleet, goodput.synchronous()), 2)
      0.94

    References:
      Daly, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", FGCS 22(3), 2006.
    """
    groups = _groups(fleet, scheme)
    found = [_estimate_group(fleet, group) for group in groups]
    share = sum(group.slices * goodput for group, (goodput, _) in zip(groups, found, strict=True)) / fleet.slices
    if scheme.groups == 1:
        return share
    up = sum(up for _, up in found) / scheme.groups
    # For a group that is up, the probability that so many of the others are too.
    share *= _at_most(scheme.groups - scheme.quorum, scheme.groups - 1, 1 - up)
    stop = fleet.detect + (scheme.resize if scheme.kind == "shrink" else fleet.restart + fleet.reload)
    beyond = min(max(0.0, scheme.grace - scheme.overlap * fleet.step), stop)
    rate = fleet.slice_rate * (fleet.slices / scheme.groups - scheme.spares)
    return share * max(0.0, 1 - (scheme.groups - 1) * rate * up * beyond)


def _estimate_group(fleet: Fleet, group: _Group) -> tuple[float, float]:
    """The goodput of a group, and the share of time that it is up."""
    rate, slices = fleet.slice_rate, group.slices
    if not rate:
        computing = 1.0 if math.isinf(group.cycle) else group.cycle / (group.cycle + group.pause)
        return computing * (slices - group.spares) / slices, 1.0
    away = rate * fleet.mean_absence / (1 + rate * fleet.mean_absence)
    whole = group.cycle + group.pause
    if group.kind == "fixed":
        total = (slices - group.spares) * rate
        up = math.exp(-total * fleet.reload) / (1 + total * (fleet.detect + fleet.restart))
        # And enough slices are there.
        up *= _at_most(group.spares, slices, away)
        # A cycle so long that no failure spares it has no share.
        kept = total * group.cycle / math.expm1(total * whole) if total * whole < 700 else 0.0
        return (slices - group.spares) / slices * up * kept, up
    total = slices * (1 - away) * rate
    # A slice comes back, and stops the others once more, unless another one takes its place at once.
    leave = (fleet.slice_chips / fleet.mtbf if fleet.repair else 0.0) + (1 / fleet.preemption if fleet.outage else 0.0)
    returns = slices * (1 - away) * leave
    if group.kind == "shrink" and slices > 1:
        up = 1 / (1 + total * (fleet.detect + group.resize) + returns * group.resize)
        kept = group.cycle / whole * max(0.0, 1 - total * fleet.step / 2)
        return (1 - away) * up * kept, up
    both = total + returns
    # A phase of work ends with a failure or a return, whichever is first.
    reached = math.exp(-both * fleet.reload)
    stop = (total * (fleet.detect + fleet.restart) + returns * (group.save + fleet.restart)) / both
    failed = group.cycle / math.expm1(both * whole) if both * whole < 700 else 0.0
    planned = group.cycle / whole / both
    length = 1 / both + stop
    kept = (total * failed + returns * planned) / both * reached
    return (1 - away) * kept / length, reached / both / length


def _at_most(most: int, number: int, share: float) -> float:
    """The probability that no more than `most` of a number are away, each of which is with a probability."""
    if most >= number or share <= 0:
        return 1.0
    if share >= 1:
        return 0.0
    k = np.arange(most)
    # Of k + 1 from that of k; logarithms, since the first ones are tiny.
    steps = np.log((number - k) / (k + 1)) + math.log(share / (1 - share))
    logs = number * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(steps)])
    return min(1.0, float(np.exp(logs).sum()))


def bill(
    fleet: Fleet, scheme: Scheme, found: Goodput, *, tokens_per_second: Number, price: Number, egress: Number = 0.0
) -> Bill:
    """Returns tokens an hour and what they cost.

    Args:
      fleet: the chips; all are paid for, working or not.
      scheme: its `message_bytes` leave each island once a round. Data parallelism is in one place.
      found: of `simulate`, for the same fleet and scheme.
      tokens_per_second: of the whole fleet, when nothing fails.
      price: dollars for a chip and an hour.
      egress: dollars for 1e9 bytes that an island sends.

    Raises:
      ValueError: for a negative number, or no tokens.

    Examples:
      >>> from jaxdist.analysis import goodput
      >>> fleet = goodput.fleet(512, mtbf=3.2e7, slice_chips=256)
      >>> found = goodput.simulate(fleet, goodput.synchronous())
      >>> spent = goodput.bill(fleet, goodput.synchronous(), found, tokens_per_second=2e6, price=1.2)
      >>> f"{spent.dollars_per_hour:.0f} dollars an hour, {spent.dollars_per_billion_tokens:.0f} for 1e9 tokens"
      '614 dollars an hour, 87 for 1e9 tokens'
    """
    check_range("tokens_per_second", tokens_per_second, 0, ends="()")
    check_range("price", price, 0)
    check_range("egress", egress, 0)
    tokens = 3600 * tokens_per_second * found.goodput
    sent = found.exchanges / 24 * scheme.message_bytes / scheme.fragments
    dollars = fleet.chips * price + sent / 1e9 * egress
    return Bill(tokens, dollars, 1e9 * dollars / tokens if tokens else math.inf)
