#!/usr/bin/env bash
# datasets 5.2.0 (Hugging Face), a data set that is streamed, on one process.
# A training loop reads some examples, saves IterableDataset.state_dict() with its checkpoint, loads that after a restart
# with load_state_dict, and may be stopped again before it reads another example: its batches were still in a buffer, or
# it was preempted at once. One expects state_dict() to give back what was loaded. Seen: until the first example is read
# it is the state of a data set that was never read, also once an iterator has been made. Who loads that reads all
# examples once more, without an error; the iterator that was made meanwhile does continue at the right one.
# Exits with an error if state_dict() returns what was loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1
"$folder/venv/bin/python" - <<'PY'
from itertools import islice

from datasets import Dataset


def stream():
    return Dataset.from_dict({"number": list(range(6))}).to_iterable_dataset()


def numbers(examples):
    return [example["number"] for example in examples]


first = stream()
assert numbers(islice(first, 3)) == [0, 1, 2]
saved = first.state_dict()

# The usual way: what is read after a restart follows what was read before.
second = stream()
second.load_state_dict(saved)
assert numbers(second) == [3, 4, 5]

# Saved again before anything is read.
third = stream()
third.load_state_dict(saved)
reader = iter(third)
again = third.state_dict()
fourth = stream()
fourth.load_state_dict(again)
found = numbers(fourth)
print("the iterator goes on with", numbers(reader), "and its saved position leads to", found)
assert again == stream().state_dict() != saved
assert found == [0, 1, 2, 3, 4, 5]
PY
