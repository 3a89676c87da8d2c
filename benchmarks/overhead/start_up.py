"""Processor seconds of `import jaxdist` above `import jax, optax`, and of a program's start up to its first loss.

    python benchmarks/overhead start_up --before ../OTHER_CHECKOUT --out benchmarks/reports/NAME

The program is the one of the README, which ends after it has printed its first loss. Each run is a process of its own;
runs of both checkouts alternate, and medians count. Byte code is compiled before, as it is in an installed package.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, write_record


def first_step() -> str:
    """The program of the README, up to its first loss."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = next(block for block in blocks if "use_cpu_devices" in block)
    before, found, _ = program.partition("    if i % 50 == 0:")
    assert found, "the README's program has changed"
    return before + '    print(f"loss {loss:.3f}")\n    break\n'


def seconds(program: str, checkout: Path, folder: str) -> float:
    """The processor seconds of a process that runs the program with the library of this checkout."""
    # In a folder without a library: the current one comes first.
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": folder, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, check=True, capture_output=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    without, program = "import jax, optax", first_step()
    checkouts = {"now": ROOT} | ({"before": given.before.resolve()} if given.before else {})
    runs = {("jax and optax", "now"): without}
    for name in checkouts:
        runs |= {("import", name): f"{without}, jaxdist", ("first step", name): program}
    times: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(given.repetitions + 1):
            for run, code in runs.items():
                found = seconds(code, checkouts[run[1]], folder)
                # The first round compiles the byte code.
                if repetition:
                    times[run].append(found)
    results = [{"what": what, "library": name, "seconds": statistics.median(times[what, name])} for what, name in runs]
    write_record(given.out, f"start_up_python{sys.version_info.major}.{sys.version_info.minor}", results)
    for result in results:
        print(result)
