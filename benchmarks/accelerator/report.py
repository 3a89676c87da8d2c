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
    copy = known.get(("copy", "-x in place"), {})
    rate = copy["bytes"] / copy["seconds"] if "seconds" in copy else None
    if rate:
        lines += [f"A copy of {copy['bytes'] / 8e6:,.0f} M entries reads and writes {rate / 1e9:,.0f} GB/s.", ""]
    for section in dict.fromkeys(section for section, _ in known if section not in ("device", "copy", "plan")):
        found = [row for row in known.values() if row["section"] == section and "skipped" not in row]
        if found:
            lines += table(section, found, rate)
    found = [row for row in known.values() if row["section"] == "plan" and "skipped" not in row]
    lines += plans(found) if found else []
    skipped = [row for row in known.values() if "skipped" in row]
    if skipped:
        lines += ["## Skipped", ""]
        lines += [f"- {row['section']}, {row['name']}: {row['skipped'].splitlines()[0]}" for row in skipped]
    return "\n".join(lines).rstrip() + "\n"


def table(section: str, rows: list[dict], rate: float | None) -> list[str]:
    """Milliseconds, and what the bytes that must move would take at the rate of the copy."""
    lines = [f"## {section}", "", "| | ms | of the copy's rate | |", "|---|--:|--:|---|"]
    for row in rows:
        share = share_of(row, row["seconds"], rate) if section != "offload" else ""
        lines.append(f"| {row['name']} | {1e3 * row['seconds']:.3f} | {share} | {note(row, rate)} |")
    return [*lines, ""]


def share_of(row: dict[str, Any], seconds: float, rate: float | None) -> str:
    return f"{row['bytes'] / seconds / rate:.0%}" if rate and "bytes" in row else ""


def note(row: dict[str, Any], rate: float | None) -> str:
    found = []
    if "decompress_seconds" in row:
        back = row["decompress_seconds"]
        found.append(", ".join(filter(None, [f"decompress {1e3 * back:.3f} ms", share_of(row, back, rate)])))
    if row.get("one_pass") is False:
        found.append("**in two passes: the kernel of `one_pass.py` is not in the program**")
    if "state_bytes" in row:
        found.append(f"state {row['state_bytes'] / row['entries']:.2f} bytes an entry")
    if "ratio" in row:
        found.append(f"{row['ratio']:.3f} of the step by hand, {1e3 * row['by_hand_seconds']:.3f} ms")
    if "flops" in row:
        found.append(f"{row['flops'] / row['seconds'] / 1e12:,.0f} TFLOP/s")
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
