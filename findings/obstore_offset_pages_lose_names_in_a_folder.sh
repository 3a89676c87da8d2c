#!/usr/bin/env bash
# obstore 0.12.1 (object_store of Rust), LocalStore beside MemoryStore.
# list(offset=NAME) gives the names after NAME in alphabetical order, and reading on from the last name that one has seen
# pages through a bucket, where names come in that order, and through a MemoryStore. A folder gives them in the order of
# its directory, so the last name of a chunk can be any: reading on from it leaves names out, without an error. The
# largest name of a whole listing, and no chunk, is a place to read on from.
# Exits with an error if paging in a folder becomes complete, or paging in memory stops to be.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check obstore==0.12.1
cat > "$folder/pages.py" <<'PY'
import sys
import tempfile

import obstore
from obstore.store import LocalStore, MemoryStore

NAMES = [f"rounds/{number:04d}" for number in range(400)]


def page_through(store):
    """The names that one sees who reads on from the last name of each chunk of fifty."""
    seen, last = [], None
    while True:
        chunk = next(iter(obstore.list(store, "rounds", offset=last, chunk_size=50)), [])
        if not chunk:
            return seen
        seen += [entry["path"] for entry in chunk]
        last = seen[-1]


found = {}
for name, store in {"memory": MemoryStore(), "folder": LocalStore(tempfile.mkdtemp(dir=sys.argv[1]))}.items():
    for path in NAMES:
        obstore.put(store, path, b"")
    found[name] = set(page_through(store))
    whole = {entry["path"] for entry in obstore.list(store, "rounds").collect()}
    print(f"{name}: {len(found[name])} names in pages, {len(whole)} in one listing")
    assert whole == set(NAMES)
assert found["memory"] == set(NAMES)
assert len(found["folder"]) < len(NAMES)
PY
"$folder/venv/bin/python" "$folder/pages.py" "$folder"
