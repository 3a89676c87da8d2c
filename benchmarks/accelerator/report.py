"""The report of `gpu.py`: tables, and what the plans are held to."""

import json
from pathlib import Path
from typing import Any

from .rows import Rows

# What the plans are held to: the relative error of the step time and of the peak memory.
WITHIN = {"seconds": 0.20, "peak": 0.05}


def write(rows: Rows, folder: Path) -> None:
    """Writes `gpu.md`, and all rows in one `gpu.json`."""
    known = rows.known()
    (folder / "gpu.json").write_text(json.dumps(list(known.values()), indent=1) + "\n")
    (folder / "gpu.md").write_text(report(known))


def report(known: dict[tuple[str, str], dict]) -> str:
    device = known.get(("device", "jax"), {"kind": "no device yet", "jax": ""})
    lines = [f"# One {device['kind']}", "", f"`python benchmarks/gpu.py`, jax {device['jax']}.", ""]
    copy, large = (known.get(("copy", name), {}).get("seconds") for name in ("codes", "optimizer"))
    if copy:
        rate = 2 * known["copy", "codes"]["bytes"] / copy / 1e9
        lines += [f"A copy of the codes' array takes {1e6 * copy:.0f} us, {rate:.0f} GB/s read and written.", ""]
    for section in dict.fromkeys(section for section, _ in known if section not in ("device", "copy", "plan")):
        found = [row for row in known.values() if row["section"] == section and "skipped" not in row]
        if found:
            lines += table(section, found, copy, large)
    found = [row for row in known.values() if row["section"] == "plan" and "skipped" not in row]
    lines += plans(found) if found else []
    skipped = [row for row in known.values() if "skipped" in row]
    if skipped:
        lines += ["## Skipped", ""]
        lines += [f"- {row['section']}, {row['name']}: {row['skipped'].splitlines()[0]}" for row in skipped]
    return "\n".join(lines).rstrip() + "\n"


def table(section: str, rows: list[dict], copy: float | None, large: float | None) -> list[str]:
    """Milliseconds and the part of the bandwidth: of a copy of the array, or of the bytes that a step must move."""
    lines = [f"## {section}", "", "| | ms | of the bandwidth | |", "|---|--:|--:|---|"]
    for row in rows:
        share = ""
        if "bytes" in row and large and section in ("states", "torch", "torchao", "bitsandbytes"):
            # The copy moves eight bytes an entry, AdamW 28.
            share = f"{28 / 8 * large / row['seconds']:.0%}"
        elif copy and section in ("codes", "selection", "torch", "bitsandbytes") and "PowerSGD" not in row["name"]:
            share = f"{copy / row['seconds']:.0%}"
        lines.append(f"| {row['name']} | {1e3 * row['seconds']:.3f} | {share} | {note(row, copy)} |")
    return [*lines, ""]


def note(row: dict[str, Any], copy: float | None) -> str:
    found = []
    if "decompress_seconds" in row:
        back = row["decompress_seconds"]
        found.append(f"decompress {1e3 * back:.3f} ms" + (f", {copy / back:.0%}" if copy else ""))
    if "state_bytes" in row:
        found.append(f"state {row['state_bytes'] / (row['bytes'] / 28):.2f} bytes an entry")
    if "ratio" in row:
        found.append(f"{row['ratio']:.3f} of the step by hand, {1e3 * row['by_hand_seconds']:.3f} ms")
    if row["section"] == "offload" and row["name"].startswith("to "):
        found.append(f"{row['bytes'] / row['seconds'] / 1e9:.1f} GB/s")
    return "; ".join(found)


def plans(rows: list[dict]) -> list[str]:
    lines = ["## plan", "", "| model | | predicted | real | error | |", "|---|---|--:|--:|--:|---|"]
    for row in rows:
        for key, unit, scale in (("seconds", "ms a step", 1e3), ("peak", "MB at the peak", 1e-6)):
            # Of a device that is no target of `jaxdist plan`: from its own program.
            predicted = row.get(f"predicted_{key}", row[f"read_{key}"])
            real = row.get(key)
            if real is None:
                lines.append(f"| {row['name']} | {unit} | {scale * predicted:,.1f} | not counted here | | |")
                continue
            error = predicted / real - 1
            verdict = "within" if abs(error) <= WITHIN[key] else "missed"
            lines.append(
                f"| {row['name']} | {unit} | {scale * predicted:,.1f} | {scale * real:,.1f} | {error:+.0%} | "
                f"{verdict} {WITHIN[key]:.0%} |"
            )
    return [*lines, ""]
