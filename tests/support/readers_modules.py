"""Modules of a reader, as a command finds them in its working directory, and a reader's environment."""

import contextlib
import os
import sys


@contextlib.contextmanager
def modules_in(folder, monkeypatch, **sources):
    """Makes a folder with these modules the working directory; whatever modules it has at the end are forgotten."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    yield folder
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def readers_environment():
    """The variables of this process, without the number of devices that our tests have: that is the program's business.

    With how much effort to compile is ours.
    """
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    flags = [flag for flag in environment.pop("XLA_FLAGS", "").split() if "device_count" not in flag]
    return environment | {"XLA_FLAGS": " ".join(flags)}
