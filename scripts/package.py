"""Builds the package and installs it as a user does: by its name, from an index, with the checkout out of sight.

    python scripts/package.py build
    python scripts/package.py install python3.11 python3.12 python3.13 --kinds wheel sdist

`build` fills `dist` and has twine check it. `install` makes an empty environment of each Python for the wheel and for
the source distribution, and installs `jaxdist[cli,train]` there from a folder that holds one of the two and downloaded
dependencies: `--no-index` leaves pip no other place to find them. Then the program of the README must print what the
README shows, and the command `jaxdist` must run. Both workflows that build the package use this script.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
KINDS = {"wheel": "*.whl", "sdist": "*.tar.gz"}
EXTRAS = "cli,train"
PROGRAM = re.compile(r"^```python\n(.*?)^```$.*?^It prints:\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DECIMAL = re.compile(r"\d+\.\d+")
# Where the package was installed, and its version.
FOUND = "import importlib.metadata as m, jaxdist; print(jaxdist.__file__, m.version('jaxdist'), jaxdist.__version__)"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints; a command that fails shows it and ends this script."""
    # Modules of the checkout must not stand in for those of the package.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # On a machine with an accelerator too, the README's eight workers are on the CPU.
    environment |= {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    print("$", *(str(word) for word in command), file=sys.stderr, flush=True)
    ended = subprocess.run([*map(str, command)], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"{ended.stdout}\n{command[0]} ended with {ended.returncode}")
    return ended.stdout


def make_environment(python: str, place: Path) -> Path:
    """The Python of a new environment that holds pip alone."""
    run(python, "-m", "venv", place)
    return place / "bin" / "python"


def build(work: Path) -> None:
    """Builds the source distribution, and the wheel from it, and checks both."""
    shutil.rmtree(DIST, ignore_errors=True)
    tools = make_environment(sys.executable, work / "tools")
    run(tools, "-m", "pip", "install", "-q", "build", "twine")
    run(tools, "-m", "build", "--outdir", DIST)
    built = [find_built(kind) for kind in KINDS]
    print(run(tools, "-m", "twine", "check", "--strict", *built))


def find_built(kind: str) -> Path:
    """The file of a kind in `dist`, which must be the only one."""
    found = [*DIST.glob(KINDS[kind])]
    if len(found) != 1:
        raise SystemExit(f"{DIST} has {len(found)} files {KINDS[kind]}: run `python scripts/package.py build`")
    return found[0]


def fill_index(python: Path, kind: str, index: Path) -> None:
    """Downloads what the package needs, and what it is built with, and puts one kind of the package beside them."""
    wheel = find_built("wheel")
    run(python, "-m", "pip", "download", "-q", "-d", index, f"{wheel}[{EXTRAS}]", "hatchling")
    (index / wheel.name).unlink()
    shutil.copy(find_built(kind), index)


def install(python: str, kind: str, work: Path) -> str:
    """Installs one kind of the package for one Python, and uses it; the line that says what was tried."""
    place, index, elsewhere = work / "environment", work / "index", work / "elsewhere"
    elsewhere.mkdir()
    ours = make_environment(python, place)
    fill_index(ours, kind, index)
    options = ("--no-index", "--find-links", index)
    run(ours, "-m", "pip", "install", "-q", *options, f"jaxdist[{EXTRAS}]", cwd=elsewhere)
    run(ours, "-m", "pip", "check", cwd=elsewhere)
    file, *versions = run(ours, "-c", FOUND, cwd=elsewhere).split()
    if not Path(file).is_relative_to(place) or len({*versions}) != 1:
        raise SystemExit(f"{file} was imported, with the versions {versions}")
    check_program(ours, elsewhere)
    for words in (["--help"], ["doctor", "--devices", "2"], ["train", "--steps", "2", "--devices", "2"]):
        run(place / "bin" / "jaxdist", *words, cwd=elsewhere)
    numbers = "import platform, jax; print('Python', platform.python_version(), 'jax', jax.__version__)"
    return f"jaxdist {versions[0]}, {kind}: {run(ours, '-c', numbers, cwd=elsewhere).strip()}"


def check_program(python: Path, elsewhere: Path) -> None:
    """Runs the program of the README, which must print its words and its bytes, and losses close to those shown."""
    program, shown = PROGRAM.search((ROOT / "README.md").read_text()).groups()
    (elsewhere / "program.py").write_text(program)
    printed = run(python, "program.py", cwd=elsewhere)
    losses, wanted = ([float(number) for number in DECIMAL.findall(text)] for text in (printed, shown))
    same = DECIMAL.sub("#", printed) == DECIMAL.sub("#", shown)
    if not same or any(abs(loss - want) > 0.02 for loss, want in zip(losses, wanted)):
        raise SystemExit(f"the README's program printed\n\n{printed}\nand the README shows\n\n{shown}")


def main() -> None:
    """Builds, or installs with each Python and prints a line for each environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build")
    tried = commands.add_parser("install")
    tried.add_argument("pythons", nargs="+", help="commands, such as python3.12")
    tried.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    given = parser.parse_args()
    if given.command == "build":
        with tempfile.TemporaryDirectory() as work:
            build(Path(work))
        return
    for python in given.pythons:
        for kind in given.kinds:
            with tempfile.TemporaryDirectory() as work:
                print(install(python, kind, Path(work)), flush=True)


if __name__ == "__main__":
    main()
