"""Modules of a reader, as a command finds them in its working directory."""

import contextlib
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
