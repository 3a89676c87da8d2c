#!/usr/bin/env bash
# obstore 0.12.1 (object_store of Rust), LocalStore beside MemoryStore.
# Copying an object onto itself is the usual way to make it look new to rules that delete by age: in memory its time of
# change becomes that of the copy. In a folder the time stays, so what is kept alive in this way is deleted all the same,
# and a second directory entry NAME#0 is left beside it. No listing shows that entry, and every call that is given its
# name is refused, so it can be removed with the tools of the file system alone. rename onto itself leaves nothing.
# Exits with an error if any of this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check obstore==0.12.1
cat > "$folder/copy.py" <<'PY'
import os
import sys
import tempfile
import time

import obstore
from obstore.store import LocalStore, MemoryStore

place = tempfile.mkdtemp(dir=sys.argv[1])
local, memory = LocalStore(place), MemoryStore()
for store in (local, memory):
    obstore.put(store, "anchor", b"weights")


def changed(store):
    return obstore.head(store, "anchor")["last_modified"]


def names():
    return [entry["path"] for entry in obstore.list(local).collect()]


before = changed(local), changed(memory)
time.sleep(1.1)
obstore.rename(local, "anchor", "anchor")
assert os.listdir(place) == ["anchor"]
for store in (local, memory):
    obstore.copy(store, "anchor", "anchor")
print("newer after the copy: folder", changed(local) > before[0], "memory", changed(memory) > before[1])
assert (changed(local) > before[0], changed(memory) > before[1]) == (False, True)
print("directory", sorted(os.listdir(place)), "listing", names())
assert sorted(os.listdir(place)) == ["anchor", "anchor#0"] and names() == ["anchor"]
try:
    obstore.delete(local, "anchor#0")
except obstore.exceptions.GenericError as error:
    print("delete:", str(error).splitlines()[0])
else:
    raise SystemExit("the entry can be deleted")
obstore.delete(local, "anchor")
print("after the object is deleted", os.listdir(place), names())
assert os.listdir(place) == ["anchor#0"] and names() == []
PY
"$folder/venv/bin/python" "$folder/copy.py" "$folder"
