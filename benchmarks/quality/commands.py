"""Is what the pages' commands train with as good as `exact`, and as the same reducer without its memory?

    python benchmarks/quality commands --out benchmarks/reports/NAME

Reads every `jaxdist train` and `jaxdist compare` from the shell blocks of the pages, and runs each method with the
optimizer, the data and the steps of its command, with three seeds, beside `exact` and its own plain form: the reducer
without `ef:`, `loco:` or `ef21:`, local steps without a reducer. Text is learned by `gpt:tiny`, the smallest model.

Left out are commands that have a report of their own (`--suite`, `--engine ray`), whose results are those of other ones
(`--zero`, `--islands`), that need data or code of the reader (`--text`, `my_reducers`), and those of more than 500
steps. A loop over rates is run at one in the middle.

Rows are appended to `commands.jsonl`; a method that the file has already is not repeated. `commands.md` has the table.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import ROOT, append_rows

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "examples/README.md")
SHELL = re.compile(r"^( *)```shell[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LOOP = re.compile(r"for (\w+) in (.*); do")
MEMORY = re.compile(r"^(?:ef|loco|ef21):")
MOST_STEPS = 500
LEFT_OUT = ("--suite", "--engine", "--zero", "--islands", "--text")


class Setting(NamedTuple):
    """What the methods of a comparison share."""

    workload: str
    optimizer: str
    steps: int


def commands() -> Iterator[tuple[str, str]]:
    """Each command that trains, on one line and with the variable of its loop filled in, and the name of its page."""
    for page in PAGES:
        for _, block in SHELL.findall(page.read_text()):
            loop = LOOP.search(block)
            for line in block.replace("\\\n", " ").splitlines():
                if not re.match(r"jaxdist (train|compare)\b", line.strip()):
                    continue
                if loop:
                    values = loop[2].split()
                    line = line.replace(f"${loop[1]}", values[len(values) // 2])
                yield " ".join(line.partition(" #")[0].split()), page.name


def read_command(command: str) -> tuple[Setting, tuple[str, ...]] | None:
    """The setting and the methods of a command, as `compare` spells them; None for what is left out."""
    program, *words = shlex.split(command)[1:]
    if any(word in LEFT_OUT or "my_" in word for word in words):
        return None
    parser = argparse.ArgumentParser()
    trains = program == "train"
    parser.add_argument("--optimizer", default="adamw:1e-3" if trains else "adamw:2e-3")
    parser.add_argument("--workload", default="text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sync")
    parser.add_argument("--reducer")
    default = ["exact", "f16", "qsgd:4", "ef:power_sgd:4"]
    default += ["compressed_adam:2e-3/ef:top_k:0.01", "compressed_adam:2e-3/ef:sign"]
    parser.add_argument("--reducers", nargs="+", default=default)
    given, _ = parser.parse_known_args(words)
    if given.steps > MOST_STEPS:
        return None
    methods = tuple(given.reducers)
    if trains:
        reducer = given.reducer or (None if given.sync else "ef:power_sgd:4")
        methods = ("/".join(x for x in (given.sync, reducer) if x),)
    return Setting(given.workload, given.optimizer, given.steps), methods


def plain_form(method: str) -> str | None:
    """The method without the memory of its reducer, or local steps without a reducer; None for a plain one."""
    outer, slash, reducer = method.rpartition("/")
    if MEMORY.match(reducer):
        return outer + slash + MEMORY.sub("", reducer)
    return outer if slash and not outer.startswith("compressed_adam") else None


def methods_of_pages() -> dict[Setting, dict[str, set[str]]]:
    """The methods of each setting, and the pages that name them; `exact` and plain forms have none."""
    found: dict[Setting, dict[str, set[str]]] = {}
    for command, page in commands():
        setting, methods = read_command(command) or (None, ())
        for method in methods:
            named = found.setdefault(setting, {"exact": set()})
            named.setdefault(method, set()).add(page)
            plain = plain_form(method)
            while plain:
                named.setdefault(plain, set())
                plain = plain_form(plain)
    return found


def measure(setting: Setting, methods: list[str], seeds: int) -> list[dict[str, Any]]:
    """Trains with `jaxdist compare` in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "jaxdist._cli", "compare", "--reducers", *methods, "--seeds", str(seeds)]
        command += ["--workload", setting.workload, "--optimizer", setting.optimizer, "--steps", str(setting.steps)]
        command += ["--model", "gpt:tiny"] if setting.workload == "text" else []
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        log = [json.loads(line) for line in (folder / "runs/compare/log.jsonl").read_text().splitlines()]
    losses: dict[str, list[float | None]] = {method: [] for method in methods}
    for row in log:
        if row["kind"] == "summary":
            loss = row["held_out_loss"]
            losses[row["reducer"]].append(round(loss, 5) if loss is not None and np.isfinite(loss) else None)
    version = next(row["jax"] for row in log if row["kind"] == "run")
    return [setting._asdict() | {"method": name, "losses": found, "jax": version} for name, found in losses.items()]


def read_rows(path: Path) -> dict[Setting, dict[str, np.ndarray]]:
    """The losses of all seeds, by setting and method; what diverged is infinite."""
    found: dict[Setting, dict[str, np.ndarray]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        setting = Setting(*(row[name] for name in Setting._fields))
        losses = np.array([np.inf if x is None else x for x in row["losses"]])
        found.setdefault(setting, {})[row["method"]] = losses
    return found


def make_table(rows: dict[Setting, dict[str, np.ndarray]]) -> str:
    lines = ["| data, optimizer, steps | method | held-out loss | above `exact` | above its plain form | pages |"]
    lines.append("|---|---|--:|--:|--:|---|")
    for setting, named in methods_of_pages().items():
        found = rows.get(setting, {})
        for method, pages in named.items():
            if method not in found:
                continue
            plain = plain_form(method)
            cells = [f"{setting.workload}, `{setting.optimizer}`, {setting.steps}", f"`{method}`"]
            cells += [f"{found[method].mean():.3f}", above(found[method], found["exact"]) if method != "exact" else ""]
            cells += [above(found[method], found[plain]) if plain else "", ", ".join(sorted(pages))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def above(own: np.ndarray, base: np.ndarray) -> str:
    """The mean of the ratios of equal seeds, and half of their range."""
    if not np.isfinite(own).all():
        return "diverges"
    ratios = 100 * (own / base - 1)
    return f"{ratios.mean():+.1f} ±{np.ptp(ratios) / 2:.1f} %"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/commands"))


def main(given: argparse.Namespace) -> None:
    path = given.out / "commands.jsonl"
    for setting, named in methods_of_pages().items():
        done = read_rows(path).get(setting, {})
        missing = [method for method in named if method not in done]
        if missing:
            print(*setting, missing, flush=True)
            append_rows(given.out, "commands", measure(setting, missing, given.seeds))
    table = make_table(read_rows(path))
    path.with_suffix(".md").write_text(table + "\n")
    print(table)
