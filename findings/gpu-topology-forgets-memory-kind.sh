#!/usr/bin/env bash
# jax 0.10.2 with the CUDA 13 plugin, no GPU attached.
# A program for a GPU that is not attached is compiled with devices of jax.experimental.topologies. One expects a
# NamedSharding over them with memory_kind="pinned_host" to place an argument in host memory, as for a TPU, or to be
# refused. Seen: no error and no warning; memory_kind of the new sharding is None, because these devices list no
# memories. The lowered program has its argument on the device, so a plan of host offloading counts the state there.
# Exits with an error if the memory kind is kept, or refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
    jax==0.10.2 jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2
JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

target = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "H100"
"""
devices = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target).devices
mesh = Mesh(np.array(devices), ("data",))
sharding = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
shape = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=sharding)
text = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1).lower(shape).as_text()
print("asked for pinned_host, got", sharding.memory_kind)
print("the program names host memory:", "pinned_host" in text)
assert sharding.memory_kind is None
assert "pinned_host" not in text
PY
