"""A race to a loss over slow links: jaxdist beside PyTorch, both at their best learning rates.

    sudo python benchmarks/race measure steps --rate 100 1000 --delay 10 --torch-python PYTHON --out FOLDER
    sudo taskset -c 0 python benchmarks/race measure losses --turns jaxdist:exact:1e-3 ... --out FOLDER
    sudo python benchmarks/race measure runs --rate 100 --turns jaxdist:power_sgd:2e-3 ... --out FOLDER
    python benchmarks/race tables FOLDER

`steps` times a few steps of every mode over each link, and measures what the model of `jaxdist.analysis.step_time`
needs to predict them. `losses` trains without links, since the loss by step does not depend on them, nor on the number
of cores. The time to a loss is their product; `runs` trains over a link to the target, to verify it. Each command adds
to its file in FOLDER.
`steps --turns` is `steps` and then `runs` over the last link. `--problem tiny` tries a command in seconds.
Language models read the standard library of this Python: `TEXT=FOLDER` in the environment is that of another one.

A process of one thread on each host for each system; those of the system that does not run wait. Needs root for the
links.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

import cluster
import compare

HERE = Path(__file__).parent

MODES = {
    "jaxdist": ["exact", "f16", "power_sgd", "two_shot", "local", "diloco", "top_k"],
    "torch": ["ddp", "f16", "power_sgd", "local"],
}
ALONE = "none"  # the mode without communication
WARM_UP = 16  # at most so many steps of a mode before the clock
EVERY = 8  # steps between evaluations: whole rounds of the local methods
START_RATE = {"lm": 1e-3, "lm30": 1e-3, "mlp": 0.05, "tiny": 0.05}


class Racers(compare.System):
    """The processes of one system."""

    def start(self, mode: str, rate: float, seed: int = 0) -> float:
        return max(answer["took"] for answer in self.ask(do="start", mode=mode, rate=rate, seed=seed))

    def run_steps(self, count: int, **mode: str) -> list[float]:
        """Seconds of each step; a step is over when the slowest process is done."""
        answers = self.ask(do="run", steps=count, **mode)
        return [max(times) for times in zip(*(answer["seconds"] for answer in answers))]

    def run_alone(self) -> list[float]:
        """Seconds of some steps without communication, about half a second of them."""
        (first,) = self.run_steps(1, mode=ALONE)
        return [first, *self.run_steps(max(1, min(5, round(0.5 / first))), mode=ALONE)]

    def evaluate(self) -> float:
        return statistics.mean(answer["held_out"] for answer in self.ask(do="evaluate"))


@contextlib.contextmanager
def start_racers(given: argparse.Namespace, places: list[cluster.Host]) -> Iterator[dict[str, Racers]]:
    wanted = {"jaxdist": ("jaxdist_racer.py", sys.executable), "torch": ("torch_racer.py", given.torch_python)}
    os.environ["COMPILED"] = str(given.compiled.absolute())
    racers: dict[str, Racers] = {}
    try:
        for name, (script, python) in wanted.items():
            if python and chosen_modes(given, name):
                racers[name] = Racers(str(HERE / script), python, given.problem, places)
        yield racers
    finally:
        for racer in racers.values():
            racer.close()


def chosen_modes(given: argparse.Namespace, system: str) -> list[str]:
    """The modes of a system, in the order of `MODES` unless `--modes jaxdist:exact torch:ddp` names some."""
    if not given.modes:
        return MODES[system]
    return [mode for name, _, mode in (text.partition(":") for text in given.modes) if name == system]


def measure_steps(given: argparse.Namespace, racers: dict[str, Racers], places: list[cluster.Host]) -> None:
    """Times every mode over every link, and measures the costs that the model needs.

    The modes take turns, in the reverse order at every other repetition, and steps without communication are timed
    before and after each: machines drift.
    """
    turns = [(name, mode) for name in racers for mode in chosen_modes(given, name)]
    for racer in racers.values():
        racer.start(ALONE, START_RATE[given.problem])
        racer.run_steps(2)
    for repetition in range(given.repetitions):
        for name, mode in turns if repetition % 2 == 0 else reversed(turns):
            racers[name].start(mode, START_RATE[given.problem])
            for rate in given.rate:
                for place in places:
                    place.set_rate(rate)
                link = {"hosts": given.hosts, "rate_mbit": rate, "delay_ms": given.delay, "repetition": repetition}
                record = {"problem": given.problem, "system": name, "mode": mode, **link}
                record |= time_steps(racers[name], mode, given.seconds, places[0])
                step, alone = (1e3 * statistics.mean(record[key]) for key in ("seconds", "alone_seconds"))
                print(
                    f"{name:8}{mode:10}{rate:6g} Mbit/s {given.delay:g} ms {step:8.1f} ms, alone {alone:.1f}",
                    flush=True,
                )
                add(given.out / "steps.json", record)
                if (name, mode) == ("jaxdist", "exact"):
                    add(given.out / "links.json", link | racers[name].ask(do="link")[0])
            if name == "jaxdist" and repetition == 0:
                add_cost(given, racers[name], mode)


def add_cost(given: argparse.Namespace, racer: Racers, mode: str) -> None:
    """Measures and counts what the model needs to predict the step of the mode that was started."""
    cost = racer.ask(do="cost")
    coding = statistics.mean(answer["coding"] for answer in cost)
    record = {"problem": given.problem, "hosts": given.hosts, "mode": mode, **cost[0], "coding": coding}
    print(f"        coding {1e3 * coding:.1f} ms, {record['traffic']}", flush=True)
    add(given.out / "costs.json", record)


def time_steps(racer: Racers, mode: str, seconds: float, place: cluster.Host) -> dict[str, Any]:
    """Whole rounds of a mode, about as many as fit into the given seconds, and what one host sent in a step."""
    period = EVERY if mode in ("local", "diloco") else 1
    # Before the clock: the first steps of a hook send more, and those after them still take longer.
    probe = racer.run_steps(max(2, period))
    probe = racer.run_steps(max(1, min(round(seconds / (sum(probe[-period:]) or 1.0)), WARM_UP // period)) * period)
    whole = max(1, round(seconds / (sum(probe[-period:]) or 1.0)))
    count = max(3, min(whole, 20 // period)) * period
    alone = racer.run_alone()
    before = place.sent()
    times = racer.run_steps(count)
    sent = place.sent() - before
    return {
        "period": period,
        "seconds": times,
        "alone_seconds": [*alone, *racer.run_alone()],
        "bytes": sent / count,
        "load": os.getloadavg()[0],
    }


def train(racer: Racers, mode: str, rate: float, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Trains to the target or to the last step, and evaluates every few steps outside of the clock."""
    racer.start(mode, rate, seed)
    steps, held_out, seconds = [0], [racer.evaluate()], [0.0]
    while steps[-1] < given.steps and held_out[-1] > given.target and held_out[-1] < 2 * held_out[0]:
        seconds.append(seconds[-1] + sum(racer.run_steps(EVERY)))
        steps.append(steps[-1] + EVERY)
        held_out.append(racer.evaluate())
    return {"mode": mode, "rate": rate, "seed": seed, "steps": steps, "held_out": held_out, "seconds": seconds}


def run_turns(given: argparse.Namespace, racers: dict[str, Racers], link: dict[str, Any], path: Path) -> None:
    """Trains each `system:mode:rate` of `--turns`, with every seed."""
    for turn in given.turns:
        system, mode, rate = turn.split(":")
        if system not in racers:
            continue
        for seed in given.seeds:
            found = train(racers[system], mode, float(rate), seed, given) | {"load": os.getloadavg()[0]}
            about = {"problem": given.problem, "hosts": given.hosts, "system": system, **link, "target": given.target}
            add(path, about | found)
            last = f"{found['held_out'][-1]:.4f} after {found['steps'][-1]} steps, {found['seconds'][-1]:.1f} s"
            print(f"{system:8}{mode:10}{rate:>6} seed {seed}: {last}", flush=True)


def compile_all(given: argparse.Namespace, racers: dict[str, Racers]) -> None:
    """Compiles every mode into the cache, so that measurements start at once."""
    for name, racer in racers.items():
        for mode in [ALONE, *chosen_modes(given, name)]:
            took = racer.start(mode, START_RATE[given.problem])
            (step,) = racer.run_steps(1)
            racer.ask(do="cost")
            print(f"{name:8}{mode:10} ready in {took:.1f} s, a step {step:.2f} s", flush=True)


def add(path: Path, record: dict[str, Any]) -> None:
    """Appends a record to a list in a file, so that an interrupted run loses nothing."""
    records = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*records, record]))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", choices=["steps", "losses", "runs", "compile"])
    parser.add_argument("--problem", choices=list(START_RATE), default="lm", help="tiny: to try the commands")
    parser.add_argument("--hosts", type=int, default=2, help="one process on each")
    parser.add_argument("--torch-python", help="a Python that has torch; without it only jaxdist runs")
    parser.add_argument("--modes", nargs="+", help="only these, as in jaxdist:exact torch:ddp")
    parser.add_argument("--rate", nargs="+", type=float, default=[100.0, 1000.0], help="Mbit/s of each link")
    parser.add_argument("--delay", type=float, default=0.0, help="ms from host to host; a round trip takes two")
    parser.add_argument("--repetitions", type=int, default=3, help="of the steps")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a mode is timed on each link")
    parser.add_argument("--turns", nargs="+", default=[], help="system:mode:learning rate, for losses and runs")
    parser.add_argument("--steps", type=int, default=240, help="the most steps of a run")
    parser.add_argument("--target", type=float, default=2.7, help="the held-out loss at which a run ends")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the batches")
    parser.add_argument("--compiled", type=Path, default=Path("runs/race-compiled"), help="cache of compiled programs")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    if given.turns and not given.modes:
        given.modes = [turn.rpartition(":")[0] for turn in given.turns]
    shaped = given.command in ("steps", "runs")
    made = cluster.hosts(given.hosts, given.rate[0], given.delay) if shaped else cluster.loopback(given.hosts)
    with made as places, start_racers(given, places) as racers:
        if given.command == "compile":
            compile_all(given, racers)
            return
        if given.command == "steps":
            measure_steps(given, racers, places)
        link = {"rate_mbit": given.rate[-1], "delay_ms": given.delay} if shaped else {}
        if shaped:
            for place in places:
                place.set_rate(given.rate[-1])
        run_turns(given, racers, link, given.out / ("runs.json" if shaped else "losses.json"))
