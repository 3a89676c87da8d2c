"""Islands that are killed, late or new: the loss.

    python benchmarks/islands quality --seed 0 --out benchmarks/reports/NAME     # and seeds 1, 2

It trains the small GPT of the command line on three islands of one process, undisturbed and with kills, late ones and
joins that are drawn, and beside them `local_steps` on a mesh. Records of runs add up in a file.
"""

import argparse
import contextlib
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import append_rows

import jaxdist as jd

PERIOD = 20
TRIO = ("a", "b", "c")


class KilledError(BaseException):
    """As by SIGKILL: nothing after it reaches the store."""


class MortalStore:
    """A store whose user dies before so many more calls; `None`: never."""

    def __init__(self, store):
        self.calls_left = None
        self.store = jd.islands.SharedStore(*(self._wrap(function) for function in store))

    def _wrap(self, function):
        def call(*arguments):
            if self.calls_left is not None:
                if self.calls_left <= 0:
                    raise KilledError
                self.calls_left -= 1
            return function(*arguments)

        return call


class Trainer:
    """An island of this process, from its first `enter` to its end.

    There are no checkpoints: its inner optimizer begins anew, which is the worst case.
    """

    def __init__(self, store, tx, run, *, name, seed, timeout, begin_with):
        # Its own batches, and a copy of the first parameters, since a step donates its state.
        self.mortal, self._run, self.state = (
            MortalStore(store),
            run._replace(seed=seed),
            jax.tree.map(jnp.copy, run.state),
        )
        self._context = jd.islands.join(
            self.mortal.store, tx, name=name, round_timeout=timeout, begin_with=begin_with, keep_every=10
        )
        self.island, self.steps = self._context.__enter__(), 0

    def enter(self):
        self.state = self.island.enter(self.state)

    def train(self):
        for _ in range(PERIOD):
            self.state, _ = self._run.step(self.state, self._run.batch(self.steps))
            self.steps += 1

    def meet(self):
        """Returns the members of the round, none if the island died in it."""
        try:
            self.state, report = self.island.meet(self.state)
        except KilledError:
            return ()
        return report.members

    def die(self):
        self.mortal.calls_left = 0
        with contextlib.suppress(KilledError):
            self._context.__exit__(None, None, None)

    def leave(self):
        self.island.leave()
        self._context.__exit__(None, None, None)


def make_method(inner, *, learning_rate=0.7, **where):
    """DiLoCo with 4 bits and error feedback."""
    outer = optax.sgd(learning_rate, momentum=0.9, nesterov=True)
    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    return jd.local_steps(inner, outer, sync_period=PERIOD, reducer=reducer, **where)


def island_seed(seed, session):
    """The seed of the batches of the `session`-th island that enters."""
    return 1000 * (seed + 1) + session


def draw_churn(rng, rounds):
    """What happens in which round: a kill in every ten, a late island in every ten, a fourth island for a third.

    A kill strikes before a drawn call of the store, so before or after the drift is sent; one or two rounds later the
    island is back.
    """
    churn = {}
    for first in range(0, rounds - 9, 10):
        victim, straggler = (str(name) for name in rng.choice(TRIO, 2, replace=False))
        churn[first + int(rng.integers(1, 4))] = ("kill", victim, int(rng.integers(0, 20)), int(rng.integers(1, 3)))
        churn[first + int(rng.integers(6, 9))] = ("late", straggler)
    churn[rounds // 30 * 10] = ("join", "d")
    churn[rounds // 15 * 10 - 1] = ("leave", "d")
    return churn


def train_islands(tx, run, *, rounds, timeout, churn):
    """Trains three islands by turns; only their meetings are side by side, so that a loaded machine makes none late.

    Returns:
      The loss of the last global parameters, and what happened.
    """
    store, trainers, starts, drifting = jd.islands.memory(), {}, dict.fromkeys(TRIO, 0), {}
    members, happened, sessions, ended = [], dict.fromkeys(("none", "kill", "late", "join", "leave"), 0), 0, []
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            kind, *event = churn.get(number, ("none", ""))
            name = event[0]
            happened[kind] += 1
            if kind == "join":
                starts[name] = number
            if kind == "leave":
                ended.append(trainers.pop(name))
                ended[-1].leave()
            beginning = [one for one, start in starts.items() if start == number]
            for one in beginning:
                sessions += 1
                settings = {"seed": island_seed(run.seed, sessions), "begin_with": 1 if number else len(TRIO)}
                trainers[one] = Trainer(store, tx, run, name=one, timeout=timeout, **settings)
            # The first ones wait for each other.
            list(pool.map(lambda one: trainers[one].enter(), beginning))
            # An island that was late in the round before is still in its meeting, and counts in this one.
            punctual = [one for one in trainers if one not in drifting]
            for one in punctual:
                trainers[one].train()
            if kind == "kill":
                trainers[name].mortal.calls_left = event[1]
            late = [name] if kind == "late" and name in punctual else []
            meetings = [pool.submit(trainers[one].meet) for one in punctual if one not in late]
            members.append(max(len(meeting.result()) for meeting in [*meetings, *drifting.values()]))
            drifting = {one: pool.submit(trainers[one].meet) for one in late}
            if kind == "kill":
                ended.append(trainers.pop(name))
                ended[-1].die()
                starts[name] = number + event[2]
        list(map(lambda meeting: meeting.result(), drifting.values()))
    newest = max(trainers.values(), key=lambda trainer: trainer.steps)
    steps = sum(trainer.steps for trainer in [*ended, *trainers.values()])
    loss = run.evaluate(newest.state)["loss"]
    for trainer in trainers.values():
        trainer.die()
    del happened["none"]
    return {"held_out_loss": loss, "steps": steps, "mean_members": statistics.mean(members), **happened}


def measure_quality(options):
    """One seed: `local_steps` on a mesh of three, three islands undisturbed, and the same with churn."""
    jd.runtime.use_cpu_devices(len(TRIO))
    from jaxdist._cli.spellings import parse
    from jaxdist._cli.training import train

    workload, rows = parse.parse_workload("text", options.model), []
    # Always the same windows, whatever the batch is.
    held_out = workload.held_out(240)[:20]
    workload = workload._replace(held_out=lambda size: held_out)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(options.rate, b2=0.99))

    def note(condition, found):
        rows.append({"condition": condition, "seed": options.seed, "rounds": options.rounds, **found})
        print(json.dumps(rows[-1]), flush=True)

    # The step averages gradients over the devices of an island, of which there is one here.
    alone = optax.chain(jd.all_reduce(jd.exact(), axis="data"), inner)
    tx = make_method(alone, learning_rate=options.outer_rate, axis=None)
    settings = {"seed": options.seed, "batch_size": options.batch}
    run = train.prepare(workload, None, tx, mesh=jd.make_mesh({"data": 1}), island=True, **settings)
    churn = draw_churn(np.random.default_rng(options.seed), options.rounds)
    common = {"rounds": options.rounds, "timeout": options.timeout}
    note("undisturbed", train_islands(tx, run, churn={}, **common))
    note("churn", train_islands(tx, run, churn=churn, **common))
    settings["batch_size"] *= len(TRIO)
    mesh = jd.make_mesh({"data": len(TRIO)})
    whole_tx = make_method(inner, learning_rate=options.outer_rate)
    whole = train.prepare(workload, None, whole_tx, mesh=mesh, sync_period=PERIOD, **settings)
    # The batches of the three islands side by side: what remains are rounding and the draws of the code.
    seeds = [island_seed(options.seed, session) for session in range(1, len(TRIO) + 1)]
    state = whole.state
    for step in range(options.rounds * PERIOD):
        parts = [workload.batch(seed, step, options.batch) for seed in seeds]
        state, _ = whole.step(state, jd.global_batch(jax.tree.map(lambda *rows: np.concatenate(rows), *parts), mesh))
    steps = options.rounds * PERIOD * len(TRIO)
    note("local_steps", {"held_out_loss": whole.evaluate(state)["loss"], "steps": steps})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt:tiny,layers=1,width=32,context=32,heads=2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--outer-rate", type=float, default=0.4)
    parser.add_argument("--timeout", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    append_rows(given.out, "quality", measure_quality(given))
