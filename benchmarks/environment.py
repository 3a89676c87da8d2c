"""Writes the hardware and software of a report, without paths and names of machines or people.

python benchmarks/environment.py --torch-python /path/to/python/with/torch --out benchmarks/reports/NAME
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "optax", "numpy", "jaxdist")


def cpu() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


def vector_instructions() -> str | None:
    """The widest vector instructions of an x86 processor."""
    flags = re.search(r"^flags\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    known = flags[1].split() if flags else []
    return next((name for name in ("avx512f", "avx2", "avx") if name in known), None)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    given = parser.parse_args()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {
        "cpu": cpu(),
        "vectors": vector_instructions(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES if version(package)},
    }
    if given.torch_python:
        code = "import torch; print(torch.__version__)"
        done = subprocess.run([given.torch_python, "-c", code], capture_output=True, text=True, check=True)
        found["torch"] = done.stdout.strip()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "environment.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
