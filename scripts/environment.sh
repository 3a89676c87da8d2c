#!/usr/bin/env bash
# Makes or renews a virtual environment with pinned versions and jaxdist in it.
#
#   scripts/environment.sh PYTHON VENV EXTRAS editable|wheel
#
# Does nothing when VENV already holds what is asked for, so that the second `make test` starts at once.
# A stamp in VENV says what it holds; another Python or other pins make it anew.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 extras=$3 install=$4

version=$("$python" -c 'import platform, sys; print(*sys.version_info[:2], platform.python_version())')
read -r major minor version <<<"$version"
if [ "$major" -ne 3 ] || [ "$minor" -lt 11 ]; then
  echo "jaxdist needs Python 3.11 or newer, and $python is $version: try make PYTHON=python3.12" >&2
  exit 1
fi
constraints=constraints/py312.txt
[ "$minor" -gt 11 ] || constraints=constraints/py311.txt

pins=$(cat pyproject.toml "$constraints" | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
stamp=$venv/jaxdist-environment
# The extras come last: an environment with more of them serves whoever asks for the first few.
wanted="python $version, pins $pins, $install, $extras"
held=$(cat "$stamp" 2>/dev/null || true)

pip_install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" "$@"; }

if [[ "$held" != "$wanted"* ]]; then
  if [ -e "$venv" ] && [ -z "$held" ]; then
    echo "$venv was not made by this script: remove it, or choose another place with make VENV=.venv-jaxdist" >&2
    exit 1
  fi
  # Packages of another Python or of other pins must not shine through.
  [[ "$held" == "python $version, pins $pins,"* ]] || rm -rf "$venv"
  if [ ! -e "$venv" ]; then
    "$python" -m venv "$venv" || { rm -rf "$venv"; exit 1; }
  fi
  echo "python $version, pins $pins, unfinished" >"$stamp"
  echo "Installing jaxdist[$extras] with $constraints into $venv" >&2
  # The build backend comes from the same pins; an isolated build would fetch whatever is newest.
  pip_install hatchling editables
  if [ "$install" = editable ]; then
    pip_install --no-build-isolation --editable ".[$extras]"
  else
    pip_install --no-build-isolation ".[$extras]"
  fi
  echo "$wanted" >"$stamp"
elif [ "$install" = wheel ]; then
  # The sources may have changed since: build and install the wheel anew, which takes a second.
  pip_install --no-build-isolation --no-deps --force-reinstall .
fi
