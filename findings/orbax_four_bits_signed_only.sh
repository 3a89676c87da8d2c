#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 with tensorstore 0.1.86, jax 0.12.0.1 on CPU.
# Arrays of int4, int2, float4_e2m1fn and float8_e4m3fn can be saved and come back bit for bit, so one expects uint4, in
# which codes of four bits are usually held, to be saved too. It cannot be. save() returns without a word; the error, which
# does not name the leaf, is raised where one waits for the save, in a training loop steps later, and no checkpoint is
# there. flax's msgpack keeps uint4.
# Exits with an error if any of this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.13}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy \
  orbax-checkpoint==0.12.8 tensorstore==0.1.86 flax==0.12.12
cat > "$folder/save.py" <<'PY'
import logging
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import serialization

logging.disable(logging.ERROR)
VALUES = np.array([1, 0, 1, 1, 0], np.int32)


def save(dtype):
    path, tree = Path(sys.argv[1], dtype), {"weights": jnp.ones(3), "codes": jnp.asarray(VALUES).astype(dtype)}
    packed = serialization.from_bytes(tree, serialization.to_bytes(tree))["codes"]
    assert packed.dtype == dtype and (packed.astype(np.int32) == VALUES).all()
    saver = ocp.StandardCheckpointer()
    saver.save(path, tree)
    try:
        saver.wait_until_finished()
    except ValueError as error:
        return f"{error}; checkpoint there: {path.exists()}; leaf named: {'codes' in str(error)}"
    found = saver.restore(path, tree)["codes"]
    assert found.dtype == dtype and (np.asarray(found).astype(np.int32) == VALUES).all()
    return "restored"


for dtype in ("int4", "int2", "float4_e2m1fn", "float8_e4m3fn"):
    print(dtype, save(dtype))
for dtype in ("uint4", "uint2"):
    print(dtype, found := save(dtype))
    assert f'Unsupported data type: "{dtype}"' in found and found.endswith("there: False; leaf named: False")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/save.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
