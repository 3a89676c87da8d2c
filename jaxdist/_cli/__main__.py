"""Runs `jaxdist` as `python -m jaxdist._cli`."""

import sys

from .._core.interrupts import raise_interrupts


def run() -> int:
    """Runs the command; exits with one line that names the extras if a package is missing."""
    # The launcher needs none of them.
    if sys.argv[1:2] == ["launch"]:
        from ..processes.launch import __main__ as launcher

        return launcher.main(sys.argv[2:])
    try:
        # Inside the function, so that a missing package gives a message instead of a traceback.
        from .main import main
    except ModuleNotFoundError as missing:
        raise SystemExit(
            f"jaxdist: error: {missing.name} is missing: pip install '.[cli,train]' in a clone of jaxdist"
        ) from missing
    raise_interrupts()
    return main()


if __name__ == "__main__":
    sys.exit(run())
