"""`python -m jaxdist._cli` is `jaxdist`."""

import sys


def run() -> int:
    """The command, or the extra that is missing in one line."""
    try:
        from .main import main
    except ModuleNotFoundError as missing:
        raise SystemExit(f"jaxdist: error: {missing.name} is missing: pip install 'jaxdist[cli,train]'") from missing
    return main()


if __name__ == "__main__":
    sys.exit(run())
