"""Modules of a reader, as a command finds them in its working directory, and a reader's environment."""

import contextlib
import os
import sys

from real_processes import flags_without_devices


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
    """The variables of this process, without the number of devices that our tests have."""
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return environment | {"XLA_FLAGS": flags_without_devices()}
