"""Step times, exposed communication and bytes of jaxdist beside PyTorch's DDP, on slow and fast links.

    sudo python benchmarks/links compare --torch-python /path/to/python/with/torch --out benchmarks/reports/NAME
    sudo python benchmarks/links compare --suite bagua --link shaped --rate 1000 --rate 100 --problem lm ...

Every process of every system stays up for the whole run, and the modes take turns, so that they share the machine's
noise. *Exposed communication* is a mode's step less the same system's step without communication, in the same
repetition, with which it alternates every few steps.
Without root, or with `--link loopback`, only the loopback interface is measured.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cluster
import report
from common import KEEP_MEMORY

HERE = Path(__file__).parent
MODES = {
    "torch": ["none", "plain", "bucket", "f16", "power_sgd"],
    "jaxdist": ["none", "exact", "f16", "power_sgd", "qsgd", "two_shot", "top_k", "sign", "hand_flat", "hand_leaf"],
}
# BAGUA's algorithms, as `jaxdist_step.py` has them.
BAGUA = ["allreduce", "bytegrad", "qadam", "qadam_1bit", "decentralized", "shift_one", "low_precision", "async"]
SUITES = {
    "reducers": MODES,
    "bagua": {"torch": ["none", "plain", "bucket"], "jaxdist": ["none", "exact", *BAGUA, "async_clock"]},
}
MOST_STEPS = 24
CHUNK = 3
# Modes whose steps differ: so many make a turn, and a figure is the mean of a turn.
TURNS = {"async": 8, "async_clock": 16}


class System(cluster.Processes):
    """The processes of one system, which wait for commands."""

    def __init__(
        self,
        script: str,
        python: str,
        problem: str,
        places: list[cluster.Host],
        settings: Mapping[str, str] = KEEP_MEMORY,
    ):
        super().__init__(python, str(HERE / script), places, {**settings, "PROBLEM": problem})
        self.about = self.answers()[0]["ready"]

    def run(self, mode: str, steps: int) -> list[dict[str, Any]]:
        return self.ask(mode=mode, steps=steps)


@contextlib.contextmanager
def systems(
    wanted: dict[str, tuple[str, str]],
    problem: str,
    places: list[cluster.Host],
    settings: Mapping[str, str] = KEEP_MEMORY,
) -> Iterator[dict[str, System]]:
    started: dict[str, System] = {}
    try:
        for name, (script, python) in wanted.items():
            started[name] = System(script, python, problem, places, settings)
        yield started
    finally:
        for system in started.values():
            system.close()


def build(running: dict[str, System], modes: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Builds all modes; yields what each said."""
    for name in running:
        for mode in ["none", *(mode for mode in modes[name] if mode != "none")]:
            built = running[name].run(mode, 0)[0]
            print(f"  {name:8}{mode:13} ready in {built['build_seconds']:5.1f} s", flush=True)
            yield {"system": name, "mode": mode, "repetition": -1, **built}


def measure(
    running: dict[str, System], modes: dict[str, list[str]], place: cluster.Host, repetitions: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields one record for each system, mode and repetition; the order of the modes is reversed every time.

    A mode alternates, a few steps at a time, with its system's step without communication: machines drift.
    """
    turns = [(name, mode) for name in running for mode in modes[name] if mode != "none"]
    steps: dict[tuple[str, str], int] = {}
    for repetition in range(repetitions):
        for name, mode in turns if repetition % 2 == 0 else reversed(turns):
            record: dict[str, Any] = {
                "system": name,
                "mode": mode,
                "repetition": repetition,
                "load": os.getloadavg()[0],
            }
            turn = TURNS.get(mode, CHUNK)
            alone, found, sent = [], [], 0.0
            while turn * len(found) < steps.get((name, mode), turn):
                alone.append(running[name].run("none", CHUNK))
                before = place.sent()
                found.append(running[name].run(mode, turn))
                sent += place.sent() - before
                # The first turn on a link says how many steps fit.
                fit = round(seconds / statistics.mean(_slowest(found)))
                steps.setdefault((name, mode), min(MOST_STEPS, max(turn, fit)))
            record |= {
                "seconds": _slowest(found),
                "alone_seconds": _slowest(alone),
                "cpu_seconds": _cpu(found),
                "alone_cpu_seconds": _cpu(alone),
                "bytes": sent / (turn * len(found)),
                "loss": found[-1][0]["loss"],
            }
            if mode in TURNS:
                record["seconds"] = [statistics.mean(_slowest([one])) for one in found]
            medians = [1e3 * statistics.median(record[key]) for key in ("seconds", "alone_seconds")]
            print(f"  {name:8}{mode:13}{medians[0]:9.1f} ms, alone {medians[1]:7.1f} ms", flush=True)
            yield record


def _slowest(chunks: list[list[dict[str, Any]]]) -> list[float]:
    """Seconds of each step; a step is over when the slowest process is done."""
    return [max(times) for chunk in chunks for times in zip(*(answer["seconds"] for answer in chunk))]


def _cpu(chunks: list[list[dict[str, Any]]]) -> float:
    return statistics.mean(answer["cpu_seconds"] for chunk in chunks for answer in chunk)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch-python", help="a Python that has torch; without it only jaxdist is measured")
    parser.add_argument("--link", action="append", choices=["loopback", "shaped"], help="both by default")
    parser.add_argument("--rate", type=float, action="append", help="Mbit/s of the shaped link, 100 by default")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--suite", choices=SUITES, default="reducers")
    parser.add_argument("--problem", action="append", choices=["lm", "mlp"], help="both by default")
    parser.add_argument("--modes", help="only these, as in torch:none,plain;jaxdist:none,exact")
    parser.add_argument("--repetitions", type=int, default=5, help="at least 3; of all modes, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a mode runs at each turn")
    parser.add_argument("--default-malloc", action="store_true", help="leave the C library's defaults as they are")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    modes = dict(part.split(":") for part in given.modes.split(";")) if given.modes else {}
    modes = {name: chosen.split(",") for name, chosen in modes.items()} or SUITES[given.suite]
    rates = given.rate or [100.0]
    wanted = {"torch": ("torch_step.py", given.torch_python), "jaxdist": ("jaxdist_step.py", sys.executable)}
    wanted = {name: how for name, how in wanted.items() if how[1] and name in modes}
    links = given.link or ["loopback", "shaped"]
    if "shaped" in links and cluster.refusal():
        print(f"only loopback: {cluster.refusal()}")
        links = ["loopback"]
    settings = {} if given.default_malloc else dict(KEEP_MEMORY)
    if "async_clock" in modes.get("jaxdist", []):
        settings["NPROC"] = "2"  # the second thread runs the programs that only communicate
    given.out.mkdir(parents=True, exist_ok=True)
    records, about = [], {}
    for link in links:
        made = cluster.loopback(given.hosts) if link == "loopback" else cluster.hosts(given.hosts, max(rates))
        with made as places:
            for problem in given.problem or ["lm", "mlp"]:
                with systems(wanted, problem, places, settings) as running:
                    about |= {name: system.about for name, system in running.items()}
                    setting = {"link": link, "hosts": given.hosts, "problem": problem}
                    records += [setting | record for record in build(running, modes)]
                    for rate in rates if link == "shaped" else [None]:
                        for place in places if rate else []:
                            place.set_rate(rate)
                        print(f"{problem} over {link}, {rate} Mbit/s", flush=True)
                        for record in measure(running, modes, places[0], given.repetitions, given.seconds):
                            records.append(setting | {"rate_mbit": rate} | record)
                            # What is measured stays, whatever ends the run.
                            text = json.dumps({"systems": about, "records": records})
                            (given.out / "links.json").write_text(text + "\n")
                    for place in places if link == "shaped" else []:
                        place.set_rate(max(rates))
    report.write(given.out)
