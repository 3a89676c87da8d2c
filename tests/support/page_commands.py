"""The commands in the shell blocks of the README and the pages."""

import re
import shlex
from functools import cache

from paths import REPOSITORY

BLOCK = re.compile(r"^ *```shell\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
JAXDIST = re.compile(r"(?:.* )?(?:\S+/)?jaxdist (.*)")
SCRIPT = re.compile(r"(?:\w+=\S+ |srun )*python ((?:examples|benchmarks)/.*)")


@cache
def lines():
    """Each line of a shell block, continued lines joined, with the name of its page."""
    found = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        for block in BLOCK.findall(page.read_text()):
            # What the shell does with the output, and its variables, is not the command's.
            texts = block.replace("\\\n", " ").splitlines()
            found += [(re.sub(r" [#>].*", "", text.strip()).replace("$rate", "1e-3"), page.name) for text in texts]
    # What the Makefile has for it.
    found += [("jaxdist compare", page) for line, page in found if line.strip() == "make demo"]
    return found


@cache
def commands():
    """The words of each `jaxdist` command, without the first, with the pages that show it."""
    found = {}
    for line, page in lines():
        if (command := JAXDIST.fullmatch(line)) and not command[1].startswith("#"):
            found.setdefault(tuple(shlex.split(command[1])), []).append(page)
    return found


@cache
def scripts():
    """The words of each command that runs an example or a benchmark, without `python`, with their pages."""
    found = {}
    for line, page in lines():
        if command := SCRIPT.fullmatch(line):
            found.setdefault(tuple(shlex.split(command[1])), []).append(page)
    return found
