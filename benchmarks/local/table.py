"""Markdown tables from the log of `jaxdist compare --suite local`, at the best rates, and the log without its steps.

python benchmarks/local table runs/local/log.jsonl --out benchmarks/reports/NAME
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from jaxdist._cli.figures import in_bytes
from jaxdist._cli.results import read_log
from jaxdist._cli.spellings.tables import peak_rate

HEAD = "| method | rate | bytes a step | fewer bytes | held-out loss | against synchronous |"
# One (seed, bytes a step, held-out loss) for each seed.
Values = list[tuple[int, float, float]]


def runs(lines: list[dict]) -> dict[tuple[int, str], dict[str, Values]]:
    """(workers, spelling): the values of each optimizer, which differ in the rate."""
    found: dict[tuple[int, str], dict[str, Values]] = defaultdict(lambda: defaultdict(list))
    head: dict = {}
    for line in lines:
        if line["kind"] == "run":
            head = line
        if line["kind"] == "summary":
            loss = float("nan") if line["held_out_loss"] is None else line["held_out_loss"]
            values = head["seed"], line["wire_bytes_per_step"], loss
            found[head["workers"], line["name"]][head["optimizer"]].append(values)
    return found


def at_best_rate(by_optimizer: dict[str, Values]) -> tuple[float, Values]:
    """The rate with the lowest mean loss, and its values; a run that diverged is the worst."""
    mean = {name: np.mean([loss for _, _, loss in values]) for name, values in by_optimizer.items()}
    best = min(mean, key=lambda name: (np.isnan(mean[name]), mean[name]))
    return peak_rate(best), by_optimizer[best]


def table(found: dict[tuple[int, str], dict[str, Values]], workers: int) -> str:
    exact = {seed: (sent, loss) for seed, sent, loss in at_best_rate(found[workers, "exact"])[1]}
    rows = [HEAD, "|---|--:|--:|--:|--:|--:|"]
    for (count, name), by_optimizer in found.items():
        if count != workers:
            continue
        rate, values = at_best_rate(by_optimizer)
        values = [(seed, sent, loss) for seed, sent, loss in values if seed in exact]
        losses = np.array([loss for _, _, loss in values])
        ratio = np.mean([exact[seed][0] / sent for seed, sent, _ in values])
        worse = 100 * np.mean([loss / exact[seed][1] - 1 for seed, _, loss in values])
        spread = f" ±{(losses.max() - losses.min()) / 2:.3f}" if len(losses) > 1 else ""
        sent = in_bytes(float(np.mean([sent for _, sent, _ in values])))
        rows.append(f"| `{name}` | {rate:g} | {sent} | {ratio:,.1f}x | {losses.mean():.3f}{spread} | {worse:+.1f} % |")
    return "\n".join(rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path)
    parser.add_argument("--name", default="local", help="what the files of the report are called")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    lines = read_log(given.log)
    found = runs(lines)
    text = "\n\n".join(
        f"{workers} workers\n\n{table(found, workers)}" for workers in dict.fromkeys(count for count, _ in found)
    )
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{given.name}.md").write_text(text + "\n")
        kept = [json.dumps(line) for line in lines if line["kind"] != "step"]
        (given.out / f"{given.name}.jsonl").write_text("\n".join(kept) + "\n")
