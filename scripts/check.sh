#!/usr/bin/env bash
# Every check of the project, in the order of their cost. pre-commit, `make test` and CI all run this script.
#
#   scripts/check.sh                 all of them
#   scripts/check.sh lint types      some of them: markers format lint spelling imports types docs tests
#
# BIN           where the tools lie (default: .venv/bin, or the PATH where that is missing)
# WORKERS       processes of pytest, each of which simulates eight devices, and threads of pyright (default 2)
# PYTEST_ARGS   more for pytest, as in PYTEST_ARGS="--slow -k power_sgd"; `--slow` leaves no sample of the register out,
#               `--full-effort` compiles with the effort that users get
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
if [ -d "$bin" ]; then
  bin=$(cd "$bin" && pwd)
  export PATH="$bin:$PATH"
fi

run() {
  echo "== $1" >&2
  case $1 in
    # A line of `=` alone also underlines a heading. The pattern is spelled so that this line is not a marker itself.
    markers)
      [ -e .git ] || return 0 # an archive of the sources
      local found=0
      git grep --line-number -I -E '^(<{7}|\|{7}|>{7})( |$)' >&2 || found=$?
      case $found in
        0) echo "conflict markers: put the halves together" >&2; return 1 ;;
        1) ;; # none
        *) return "$found" ;;
      esac
      ;;
    format)
      ruff format --check .
      find docs -name '*.md' -exec ruff format --check --line-length 84 {} +
      ;;
    lint) ruff check . ;;
    spelling) codespell jaxdist tests docs examples benchmarks ./*.md ;;
    # Read the sources, not a wheel that is installed: what is being edited is what must hold.
    imports) PYTHONPATH=. lint-imports ;;
    types) pyright --threads "${WORKERS:-2}" --pythonpath "$(command -v python)" ;;
    # The pages need an extension of Markdown from `docs`.
    docs) PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir "${SITE_DIR:-site}" ;;
    # The tests and the doctests of the installed package, so that a wheel is tested as a user gets it. A file stays with
    # one process: its tests share what they compile.
    # shellcheck disable=SC2086
    tests) pytest -q -n "${WORKERS:-2}" --dist loadfile --doctest-modules ${PYTEST_ARGS:-} tests --pyargs jaxdist ;;
    *) echo "no check is called $1: markers format lint spelling imports types docs tests" >&2; return 2 ;;
  esac
}

[ $# -gt 0 ] || set -- markers format lint spelling imports types docs tests
for check in "$@"; do run "$check"; done
