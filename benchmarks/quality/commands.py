"""Is what the pages' commands train with as good as `exact`, and as its own plain form?

    python benchmarks/quality commands --out benchmarks/reports/NAME

Reads every `jaxdist train` and `jaxdist compare` from the shell blocks of the pages. Most are run as methods of
`jaxdist compare`, with the optimizer, the data and the steps of the command: with three seeds, beside `exact` and the
plain form, which is the reducer without `ef:`, `loco:` or `ef21:`, local steps without a reducer, and a reducer without
ZeRO. Of `--suite local` these are the methods that have a plain form, at `H = 32` and 512 steps. Commands with
`--offload` or `--islands`, which `compare` does not have, are run whole: as the page has them, without the option, and
as `exact`. Rules of `jaxdist replay` are run with the workers, durations and links of the command, for at most a minute
of virtual time and without a target, beside `bsp` and without the memory of `--gradient`. Left out are `--engine ray`,
whose losses depend on the clock, and what has a report of its own: `--suite compression`, `--start 0`, and the table of
ten rules with `--nic`.

Text is learned by `gpt:tiny`, the smallest model, in at most 1,000 steps, and in 200 in whole commands and where a
command shows checkpoints (`--save-every`). `my-notes/` are the pages themselves, a bucket or a disk is a folder, an
island has a second one beside it, and modules of the reader are the blocks of the pages. Of a loop over rates one in
the middle is run.

Rows are appended to `commands.jsonl`, `whole.jsonl` and `replays.jsonl`; what these have already is not repeated. Files
`.md` of the same names have the tables.
"""

import argparse
import contextlib
import csv
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import ROOT, append_rows

from jaxdist._cli.training import suites

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "examples/README.md")
SHELL = re.compile(r"^( *)```shell[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
DIANA = "my_reducers:diana:"
LOOP = re.compile(r"for (\w+) in (.*); do")
MEMORY = re.compile(r"^(?:ef|loco|ef21):")
MOST_STEPS = 1000
# In place of `--suite local`'s 2560 steps at several `H` and rates.
LOCAL_STEPS, LOCAL_PERIOD = 512, 32
LOCAL_OPTIMIZER = suites.LOCAL_OPTIMIZER.replace("4e-3", "8e-3")
PART = 10
# Their commands are run whole: `compare` has no such options.
WHOLE = ("--offload", "--islands")
LEFT_OUT = ("--engine ray", "--suite compression", "--start 0", "--nic", "--timing-only")
MOST_SECONDS = 60.0
# The page that has the module of a command, in its first block of Python or one with this comment.
MODULES = {
    "my_reducers": "docs/how-to/add-a-reducer.md",
    "my_compressors": "docs/how-to/write-your-own-compressor.md",
    "my_idea": "docs/how-to/from-an-idea-to-a-figure.md",
    "my_model": "docs/reference/cli_runs.md",
}


class Setting(NamedTuple):
    """What the methods of a comparison share."""

    workload: str
    optimizer: str
    steps: int
    batch: int = 32
    model: str = ""
    text: str = ""


def commands(programs: str = "train|compare") -> Iterator[tuple[str, str]]:
    """Each command that trains, on one line and with the variable of its loop filled in, and the name of its page."""
    for page in PAGES:
        for _, block in SHELL.findall(page.read_text()):
            loop = LOOP.search(block)
            for line in block.replace("\\\n", " ").splitlines():
                if not re.match(rf"jaxdist ({programs})\b", line.strip()):
                    continue
                if loop:
                    values = loop[2].split()
                    line = line.replace(f"${loop[1]}", values[len(values) // 2])
                yield " ".join(line.partition(" #")[0].split()), page.name


def read_command(command: str) -> tuple[Setting, tuple[str, ...]] | None:
    """The setting and the methods of a command, as `compare` spells them; None for others."""
    if any(option in command for option in (*WHOLE, *LEFT_OUT)):
        return None
    program, *words = shlex.split(command)[1:]
    parser = argparse.ArgumentParser()
    trains = program == "train"
    parser.add_argument("--optimizer", default="adamw:1e-3" if trains else "adamw:2e-3")
    parser.add_argument("--workload", default="text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--model", default="")
    parser.add_argument("--text", default="")
    parser.add_argument("--suite")
    parser.add_argument("--sync")
    parser.add_argument("--zero")
    parser.add_argument("--reducer")
    default = ["exact", "f16", "qsgd:4", "ef:power_sgd:4"]
    default += ["compressed_adam:2e-3/ef:top_k:0.01", "compressed_adam:2e-3/ef:sign"]
    parser.add_argument("--reducers", nargs="+", default=default)
    given, _ = parser.parse_known_args(words)
    methods = tuple(given.reducers)
    if given.suite:
        given.steps, given.optimizer = LOCAL_STEPS, LOCAL_OPTIMIZER
        # The others have no plain form that they could be worse than.
        methods = ("exact", *filter(plain_form, list_local()))
    if trains:
        first = f"zero:{given.zero}" if given.zero else given.sync
        reducer = given.reducer or (None if first else "ef:power_sgd:4")
        methods = ("/".join(x for x in (first, reducer) if x),)
    model = given.model if given.model.startswith("my_") else ""
    steps = min(given.steps, 200 if "--save-every" in words else MOST_STEPS)
    settings = given.workload, given.optimizer, steps, given.batch, model, given.text
    return Setting(*settings), methods


def list_local() -> list[str]:
    """The methods of `--suite local` at one `H`, after a start of the same share of the steps."""
    warm = f",warmup_steps={LOCAL_STEPS // suites.START_SHARE}"
    spelled = (text.format(H=LOCAL_PERIOD, momentum=0.9) for text, _ in suites.METHODS.values())
    # Before the reducer, as `warmup_steps` is an argument of the rounds.
    return ["/".join([text.partition("/")[0] + warm, *text.split("/")[1:]]) for text in spelled]


def plain_form(method: str) -> str | None:
    """The method without the memory of its reducer, local steps without a reducer, ZeRO's without ZeRO, or None."""
    outer, slash, reducer = method.rpartition("/")
    if method.startswith("zero:"):
        return reducer if slash else "exact"
    if MEMORY.match(reducer):
        return outer + slash + MEMORY.sub("", reducer)
    if reducer.startswith(DIANA):
        return outer + slash + reducer.removeprefix(DIANA).partition(",")[0]
    return outer if slash and not outer.startswith("compressed_adam") else None


def methods_of_pages() -> dict[Setting, dict[str, set[str]]]:
    """The methods of each setting, and the pages that name them; `exact` and plain forms have none."""
    found: dict[Setting, dict[str, set[str]]] = {}
    for command, page in commands():
        read = read_command(command)
        if read is None:
            continue
        setting, methods = read
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
    command = ["compare", "--reducers", *methods, "--seeds", str(seeds), "--workload", setting.workload]
    command += ["--optimizer", setting.optimizer, "--steps", str(setting.steps), "--batch", str(setting.batch)]
    model = setting.model or ("gpt:tiny" if setting.workload == "text" else "")
    command += ["--model", model] if model else []
    # The pages themselves are text enough.
    command += ["--text", str(ROOT / "docs")] if setting.text else []
    log = run_commands([command])[0]
    losses: dict[str, list[float | None]] = {method: [] for method in methods}
    for row in log:
        if row["kind"] == "summary":
            losses[row["reducer"]].append(finite(row["held_out_loss"]))
    version = next(row["jax"] for row in log if row["kind"] == "run")
    return [setting._asdict() | {"method": name, "losses": found, "jax": version} for name, found in losses.items()]


def run_commands(commands: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Runs commands at a time, and returns their logs."""
    with run_in_folder(commands) as folder:
        logs = [(folder / f"out-{number}" / "log.jsonl").read_text() for number in range(len(commands))]
        return [[json.loads(line) for line in log.splitlines()] for log in logs]


@contextlib.contextmanager
def run_in_folder(commands: Sequence[Sequence[str]]) -> Iterator[Path]:
    """Runs commands at a time, in a folder of their own that has the modules of the pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for module, page in MODULES.items():
            blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
            marked = [block for block in blocks if block.startswith(f"# {module}.py")]
            (folder / f"{module}.py").write_text([*marked, blocks[0]][0])
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        running = []
        for number, words in enumerate(commands):
            command = [sys.executable, "-m", "jaxdist._cli", *words, "--out", f"out-{number}"]
            running.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
        if any([process.wait() for process in running]):
            raise RuntimeError(f"{commands} failed")
        yield folder


def finite(loss: float | None) -> float | None:
    return round(loss, 5) if loss is not None and np.isfinite(loss) else None


def read_rows(path: Path) -> dict[Setting, dict[str, np.ndarray]]:
    """The losses of all seeds, by setting and method; what diverged is infinite."""
    found: dict[Setting, dict[str, np.ndarray]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        setting = Setting(**{name: row[name] for name in Setting._fields if name in row})
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
            cells = [describe(setting), f"`{method}`"]
            cells += [f"{found[method].mean():.3f}", above(found[method], found["exact"]) if method != "exact" else ""]
            cells += [above(found[method], found[plain]) if plain else "", ", ".join(sorted(pages))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(setting: Setting) -> str:
    data = [setting.model and f"`{setting.model}`", setting.text and f"`{setting.text}`", setting.workload]
    more = f", batch {setting.batch}" if setting.batch != 32 else ""
    return f"{next(filter(None, data))}, `{setting.optimizer}`, {setting.steps}{more}"


def above(own: np.ndarray, base: np.ndarray) -> str:
    """The mean of the ratios of equal seeds, and half of their range."""
    if not np.isfinite(own).all():
        return "diverges"
    ratios = 100 * (own / base - 1)
    return f"{ratios.mean():+.1f} ±{np.ptp(ratios) / 2:.1f} %"


class Forms(NamedTuple):
    """A command of a page as it is run, without the option that it shows, and as `exact`; islands are two commands."""

    command: str
    page: str
    own: tuple[str, ...]
    plain: tuple[str, ...]
    exact: tuple[str, ...]


def whole_commands() -> list[Forms]:
    """The commands that are run as `train` runs them."""
    found = [(command, page) for command, page in commands() if any(f" {word} " in command for word in WHOLE)]
    return [Forms(command, page, *spell_forms(command)) for command, page in found]


def spell_forms(command: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The commands of `Forms`, without seeds: in a folder of their own, small, and without a baseline."""
    text = without(command.removeprefix("jaxdist "), "model", "steps", "name", "begin-with")
    text += "" if "--workload" in text else " --model gpt:tiny"
    text += " --steps 200"
    if "--offload" in text:
        text += " --no-baseline"
        text = re.sub(r"nvme:\S+", "nvme:disk", text)
        return (text,), (without(text, "offload"),), (without(text, "offload", "zero", "reducer") + " --reducer exact",)
    text = without(text, "islands")
    # As many examples and workers as two islands, each of which is one worker of any number of devices.
    together = f"{text} --no-baseline --devices 2 --batch 64"
    plain = without(text, "reducer")
    islands = [tuple(f"{x} --islands store --begin-with 2 --name {name}" for name in "ab") for x in (text, plain)]
    exact = (without(together, "sync", "reducer") + " --reducer exact",)
    return islands[0], islands[1] if "--reducer" in text else (together,), exact


def without(command: str, *options: str) -> str:
    """A command without these options and their values."""
    for option in options:
        command = re.sub(rf" --{option} \S+", "", command)
    return command


def measure_whole(form: tuple[str, ...], seeds: int) -> dict[str, Any]:
    """The held-out losses of all seeds; of two islands the mean."""
    losses: list[float | None] = []
    for seed in range(seeds):
        logs = run_commands([[*shlex.split(command), "--seed", str(seed)] for command in form])
        found = [row["held_out_loss"] for log in logs for row in log if row["kind"] == "summary"]
        assert len(found) == len(form)
        losses.append(finite(sum(found) / len(found)))
    return {"commands": list(form), "losses": losses, "jax": importlib.metadata.version("jax")}


def read_whole(path: Path) -> dict[tuple[str, ...], np.ndarray]:
    """The losses of all seeds by the commands that were run; what diverged is infinite."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {tuple(row["commands"]): np.array([np.inf if x is None else x for x in row["losses"]]) for row in rows}


def make_whole_table(rows: dict[tuple[str, ...], np.ndarray]) -> str:
    lines = ["| command | as it was run | held-out loss | above `exact` | above the plain form | page |"]
    lines.append("|---|---|--:|--:|--:|---|")
    for each in whole_commands():
        if not {each.own, each.plain, each.exact} <= rows.keys():
            continue
        own, plain, exact = rows[each.own], rows[each.plain], rows[each.exact]
        cells = [
            f"`{each.command}`",
            f"`{each.own[0]}`" + ", and `--name b`" * (len(each.own) > 1),
            f"{own.mean():.3f}",
        ]
        cells += ["" if each.own == each.exact else above(own, exact)]
        cells += ["" if each.own == each.plain else above(own, plain), each.page]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Replay(NamedTuple):
    """A command of a page as it is run, and without the memory of `--gradient`, `None` if it has none."""

    command: str
    page: str
    own: str
    plain: str | None


def replay_commands() -> list[Replay]:
    found = []
    for command, page in commands("replay"):
        if any(option in command for option in LEFT_OUT):
            continue
        text = without(command.removeprefix("jaxdist "), "events", "target", "evaluations", "seed", "seeds", "recorded")
        text = re.sub(r" --rates( [\d.]+)+", "", without(text, "table", "figure"))
        seconds = re.search(r" --seconds (\S+)", text)
        if not seconds or float(seconds[1]) > MOST_SECONDS:
            text = f"{without(text, 'seconds')} --seconds {MOST_SECONDS:g}"
        if " bsp" not in text:
            text = text.replace("--rule ", "--rule bsp ")
        plain = re.sub(r"(?<= --gradient )(?:ef|loco|ef21):", "", text)
        found.append(Replay(command, page, text, plain if plain != text else None))
    return found


def measure_replay(command: str, seeds: int) -> dict[str, Any]:
    """The mean and the standard deviation of the held-out loss at the end, by rule."""
    words = [*shlex.split(command), "--seeds", str(seeds), "--evaluations", "4", "--table", "table.csv"]
    with run_in_folder([words]) as folder, (folder / "table.csv").open() as file:
        rows = [
            {"rule": row["rule"]} | {x: finite(float(row[f"held_out_loss_{x}"])) for x in ("mean", "std")}
            for row in csv.DictReader(file)
        ]
    return {"command": command, "rules": rows, "jax": importlib.metadata.version("jax")}


def read_replays(path: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """The mean and the standard deviation of the losses by command and rule; infinite if one seed diverged."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {row["command"]: {x["rule"]: _moments(x["mean"], x["std"]) for x in row["rules"]} for row in rows}


def _moments(*found: float | None) -> tuple[float, float]:
    mean, deviation = (np.inf if x is None else x for x in found)
    return mean, deviation


def make_replay_table(rows: dict[str, dict[str, tuple[float, float]]]) -> str:
    lines = [
        "| as it was run | rule | held-out loss | above `bsp` | without the memory | page |",
        "|---|---|--:|--:|--:|---|",
    ]
    for each in replay_commands():
        found, plain = rows.get(each.own, {}), rows.get(each.plain or "", {})
        for rule, (mean, std) in found.items():
            cells = [f"`{each.own}`", f"`{rule}`", f"{mean:.3f} ±{std:.3f}" if np.isfinite(mean) else "diverges"]
            is_compared = rule != "bsp" and np.isfinite(mean)
            cells += [f"{100 * (mean / found['bsp'][0] - 1):+.1f} %" if is_compared else ""]
            cells += ["{:.3f} ±{:.3f}".format(*plain[rule]) if plain else "", each.page]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/commands"))


def main(given: argparse.Namespace) -> None:
    path = given.out / "commands.jsonl"
    # The short ones first, and a suite in parts: after an interruption it goes on with the next part.
    for setting, named in sorted(methods_of_pages().items(), key=lambda pair: len(pair[1])):
        done = read_rows(path).get(setting, {})
        missing = [method for method in named if method not in done]
        for at in range(0, len(missing), PART):
            part = missing[at : at + PART]
            print(*setting, part, flush=True)
            append_rows(given.out, "commands", measure(setting, part, given.seeds))
    whole = given.out / "whole.jsonl"
    for form in dict.fromkeys(form for each in whole_commands() for form in (each.own, each.plain, each.exact)):
        if form not in read_whole(whole):
            print(*form, flush=True)
            append_rows(given.out, "whole", [measure_whole(form, given.seeds)])
    replays = given.out / "replays.jsonl"
    for command in dict.fromkeys(form for each in replay_commands() for form in (each.own, each.plain) if form):
        if command not in read_replays(replays):
            print(command, flush=True)
            append_rows(given.out, "replays", [measure_replay(command, given.seeds)])
    tables = make_table(read_rows(path)), make_whole_table(read_whole(whole)), make_replay_table(read_replays(replays))
    for file, table in zip((path, whole, replays), tables, strict=True):
        file.with_suffix(".md").write_text(table + "\n")
        print(table)
