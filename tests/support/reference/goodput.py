"""Failures of single chips, second by second: what `jaxdist.analysis.goodput` sums over slices and plays by events."""

import numpy as np

NEXT = {"detect": "gather", "gather": "restart", "save": "restart", "restart": "reload", "reload": "up", "resize": "up"}


class Seconds:
    """One group, whose times are whole seconds; `kind`, `spares` and `resize` are those of a scheme."""

    def __init__(self, fleet, kind, spares, resize):
        self.fleet, self.kind, self.full = fleet, kind, fleet.slices - spares
        self.need = self.full if kind == "fixed" else 1
        self.long = {name: int(getattr(fleet, name)) for name in ("detect", "restart", "reload", "save")}
        self.long |= {"gather": 0, "resize": resize, "up": 0}
        self.back = np.zeros(fleet.slices)  # the second in which each slice is there again
        self.members = np.arange(self.full)  # the slices that work
        self.phase, self.left = "up", 0
        self.place = 0  # within the cycle of computation and save
        self.undone = []  # the work of each second since the last checkpoint
        self.done = self.redone = self.saving = self.stopped = 0.0

    def fail(self):
        if self.kind == "shrink":
            # Back to the start of the step.
            keep = len(self.undone) - len(self.undone) % int(self.fleet.step)
            self.phase, self.left = "resize", self.long["detect"] + self.long["resize"]
        else:
            keep = 0
            self.phase, self.left = "detect", self.long["detect"]
        self.redone += sum(self.undone[keep:])
        self.place, self.undone = min(self.place, keep), self.undone[:keep]

    def grow(self):
        if self.kind == "restart":
            self.checkpoint()
        self.phase = "resize" if self.kind == "shrink" else "save"
        self.left = self.long[self.phase]

    def checkpoint(self):
        self.done, self.place, self.undone = self.done + sum(self.undone), 0, []

    def change_phase(self, there):
        if self.phase in ("gather", "restart") and len(there) < self.need:
            self.phase, self.left = "gather", 0
        while self.phase != "up" and not self.left and (self.phase != "gather" or len(there) >= self.need):
            # The slices are chosen when the restart ends.
            self.members = there[: self.full] if self.phase in ("restart", "resize") else self.members
            self.phase = NEXT[self.phase]
            self.left = self.long[self.phase]

    def pass_second(self, second, hits):
        hits = hits & (self.back <= second)
        self.back[hits] = second + self.fleet.repair
        there = np.flatnonzero(self.back <= second)
        if self.phase in ("up", "reload"):
            if hits[self.members].any():
                self.fail()
            elif self.kind != "fixed" and len(there) > len(self.members):
                self.grow()
        self.change_phase(there)
        if self.phase != "up":
            self.stopped += min(len(there), self.full) / self.fleet.slices
            self.left -= self.left > 0
            return
        share = len(self.members) / self.fleet.slices
        if self.place < self.fleet.interval:
            self.undone.append(share)
        else:
            self.saving += share
        self.place += 1
        if self.place == self.fleet.interval + self.fleet.save:
            self.checkpoint()


def shares_by_seconds(fleet, *, kind, spares=0, resize=0, seconds, seed=0):
    """The shares of goodput, redone work, saving and stops.

    Every chip fails by itself with probability `1 / mtbf` in each second, whether it works or not.
    """
    rng = np.random.default_rng(seed)
    group = Seconds(fleet, kind, spares, resize)
    for block in range(0, seconds, 1000):
        failures = (rng.random((1000, fleet.slices, fleet.slice_chips)) < 1 / fleet.mtbf).any(2)
        for second, hits in enumerate(failures, block):
            group.pass_second(second, hits)
    return np.array([group.done + sum(group.undone), group.redone, group.saving, group.stopped]) / seconds
