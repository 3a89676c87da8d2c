"""One GPU, one command, under ten minutes: codes, selection, PowerSGD, 8-bit states, overhead, offloading, plans.

    python benchmarks/gpu.py --out benchmarks/reports/NAME [--torch-python PYTHON]

Every row is appended to `gpu.jsonl` as soon as it is measured; a second call measures what is missing, so that a lease
that ends early loses nothing. Sections run in processes of their own: one that runs out of memory or time costs no
other. The yardstick is a warm copy in place, `-x` with a donated argument, which reads and writes the array once; a row
is held to the bytes that it must move at that rate.

`PYTHON` has PyTorch for the GPU, and torchao and bitsandbytes if they are to be measured: what is not there is
skipped, and named in the report. It fails where a code of blocks was compiled without its one-pass kernel.
`--smallest` is for a test on a CPU: the same code, and numbers that mean nothing.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from accelerator import report
from accelerator.rows import SMALLEST, Rows, Sizes

SECTIONS = ("copy", "rates", "codes", "warps", "selection", "power_sgd", "states", "overhead", "offload", "plan")
OTHERS = ("torch", "torchao", "bitsandbytes")


def run_section(section: str, rows: Rows, sizes: Sizes) -> None:
    """Measures the missing rows of a section, in this process."""
    if section in OTHERS:
        missing = next(
            (name for name in dict.fromkeys(("torch", section)) if importlib.util.find_spec(name) is None), None
        )
        if missing:
            rows.skip(section, "all", f"{missing} is not installed")
            return
        from accelerator import torch_rows

        torch_rows.SECTIONS[section](rows, sizes)
        return
    from accelerator import jax_rows

    device = jax_rows.describe_device()
    rows.measure("device", "jax", lambda: device)
    if rows.known()["device", "jax"]["kind"] != device["kind"]:
        sys.exit(f"{rows.path} has rows of another device: use another --out for {device['kind']}")
    jax_rows.SECTIONS[section](rows, sizes)


def start_section(section: str, given: argparse.Namespace, seconds: float) -> str | None:
    """Measures a section in a process of its own; returns why it did not end well."""
    python = (given.torch_python or sys.executable) if section in OTHERS else sys.executable
    command = [python, __file__, "--section", section, "--out", str(given.out)]
    command += ["--smallest"] if given.smallest else []
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    # JAX would take three quarters of the memory, and the next section's process needs it.
    settings = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=os.environ | settings, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "no time was left"
    return f"its process ended with status {done.returncode}" if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS + OTHERS, default=SECTIONS + OTHERS)
    parser.add_argument("--torch-python", help="a Python with PyTorch, torchao, bitsandbytes; by default this one")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing is begun, and all is stopped")
    parser.add_argument("--smallest", action="store_true", help="the smallest sizes, for a test on a CPU")
    parser.add_argument("--section", choices=SECTIONS + OTHERS, help="run one section in this process")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows, sizes = Rows(given.out / "gpu.jsonl"), SMALLEST if given.smallest else Sizes()
    if given.section:
        run_section(given.section, rows, sizes)
        return
    end = time.monotonic() + 60 * given.minutes
    for section in given.only:
        left = end - time.monotonic()
        why = start_section(section, given, left) if left > 5 else "no time was left"
        if why:
            print(f"{section}: {why}; call again to go on", file=sys.stderr, flush=True)
        # After each section: what was measured is reported even if the machine goes away.
        report.write(rows, given.out)
    print((given.out / "gpu.md").read_text())
    # Codes without their kernel take twice as long, and give the same bits: nothing else would tell.
    slow = [row["name"] for row in rows.known().values() if row.get("one_pass") is False]
    if slow:
        sys.exit(f"compiled without the kernel of jaxdist/compressors/one_pass.py: {', '.join(slow)}")


if __name__ == "__main__":
    main()
