"""The `jaxdist` command."""

from .main import main as main

try:
    from .main import main as main
except ModuleNotFoundError as missing:
    raise SystemExit(f"jaxdist: error: {missing.name} is missing: pip install 'jaxdist[cli,train]'") from missing
