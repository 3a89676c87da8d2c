#!/usr/bin/env bash
# XLA:TPU unrolls an interleaving of narrow integers: the program grows with the array.
#
# Versions: jax 0.12.0.1 with libtpu 0.0.50.1 (Python 3.12 or 3.13), compiled for v5e:2x4 without a TPU.
# Valid input: u8[n] words with two codes of 4 bits each, unpacked as `stack([low, high], axis=-1).reshape(-1)`, the
# order of most packed formats.
# Expected: a loop over the array, so a program of the same size for four times the entries.
# Seen: straight-line code, tens of bytes of program for every byte of input: hundreds of kB for 8,192 words, and
# compile time with it; a million entries take minutes. With the low halves of 512 words first and then the high ones,
# computed in 32 bits as [runs, 2, 4, 128], the program is a small fraction of that.
# Exits with an error if the interleaved form no longer grows, or is no longer much larger than the other.
set -euo pipefail

python=${PYTHON:-python3.13}
if ! command -v "$python" > /dev/null; then
  python=python3.12
fi
if ! command -v "$python" > /dev/null; then
  echo "needs Python 3.12 or 3.13; set PYTHON"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.12.0.1" "libtpu==0.0.50.1"
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/venv/bin/python" - <<'PROGRAM'
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())


def interleaved(words):
    return jnp.stack([words & 15, words >> 4], axis=-1).reshape(-1)


def in_planes(words):
    wide = words.astype(jnp.int32).reshape(-1, 1, 4, 128)
    return jnp.concatenate([wide & 15, wide >> 4], axis=1).astype(jnp.uint8).reshape(-1)


sizes = {}
for form in (interleaved, in_planes):
    for words in (2048, 8192):
        like = jax.ShapeDtypeStruct((words,), jnp.uint8, sharding=sharding)
        start = time.time()
        compiled = jax.jit(form).lower(like).compile()
        sizes[form, words] = compiled.memory_analysis().generated_code_size_in_bytes
        print(f"{form.__name__}, {words} words: {sizes[form, words]} bytes of program, {time.time() - start:.1f} s")
grows = sizes[interleaved, 8192] > 2 * sizes[interleaved, 2048]
larger = sizes[interleaved, 8192] > 5 * sizes[in_planes, 8192]
print(f"the interleaved form grows: {grows}; it is more than five times as large: {larger}")
sys.exit(not (grows and larger))
PROGRAM
