#!/usr/bin/env bash
# XLA:GPU reads an array twice to code its blocks as soon as the scales of the blocks are a result as well.
#
# Versions: jax 0.12.0.1 with the CUDA 13 plugin (Python 3.12 or 3.13), compiled for an H100 that is not attached.
# Valid input: 4 M float32 entries in blocks of 256; the largest magnitude of each block, and int8 codes divided by it.
# Expected: one kernel, which holds a block on the chip, for the codes alone and for codes and scales alike.
# Seen: for the codes alone one kernel of XLA's Triton emitter. With the scales as a second result two kernels of other
# emitters, each of which reads all entries; the option for fusions of several results changes nothing. Every quantizer
# that is to be decoded returns its scales, so the fused form is never the one that is needed.
# Exits with an error if both are compiled to equally many kernels that read the entries.
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
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
    jax==0.12.0.1 jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 nvidia-cuda-nvcc==13.5.37 nvidia-nvvm
cat >"$folder/kernels.py" <<'PY'
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "H100"
"""


def codes_and_scales(x):
    blocks = x.reshape(-1, 256)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    return jnp.rint(blocks * (127 / scales)).astype(jnp.int8), scales


def codes(x):
    return codes_and_scales(x)[0]


devices = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET).devices
sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("data",)), jax.P())
like = jax.ShapeDtypeStruct((2**22,), jnp.float32, sharding=sharding)
found = {}
for name, function, options in (
    ("codes", codes, {}),
    ("codes and scales", codes_and_scales, {}),
    ("the same, several results", codes_and_scales, {"xla_gpu_unsupported_enable_triton_multi_output_fusion": True}),
):
    text = jax.jit(function).lower(like).compile(options).as_text()
    entry = text[text.index("ENTRY") :]
    argument = re.search(r"(%\S+) = f32\[4194304\]\S* parameter", entry)[1]
    names = {argument, *re.findall(rf"(%\S+) = \S+ bitcast\({re.escape(argument)}\)", entry)}
    fusions = re.findall(r"= .*? fusion\((.*?)\), kind=(\w+)", entry)
    readers = [kind for operands, kind in fusions if names & set(operands.split(", "))]
    found[name] = len(readers)
    print(f"{name}: the entries are read by {len(readers)} kernels, {', '.join(readers)}")
assert found == {"codes": 1, "codes and scales": 2, "the same, several results": 2}, found
PY
JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "$folder/venv/bin/python" "$folder/kernels.py"
