#!/usr/bin/env bash
# jax 0.10.2 (0.12.0.1 too), on CPU with two devices.
# A compiled step keeps a typed PRNG key in host memory and returns it there, jax.device_put(key, Space.Host), as one
# keeps optimizer state. One expects what the same words as a uint32 array do: they come back in "pinned_host", step
# after step, with donation too. Seen: on a mesh the key that the step returns says "device" while its buffer is in
# pinned_host, and with donated arguments the third call stops with "FAILED_PRECONDITION: Memory kind mismatch". On one
# device without a mesh it works.
# Exits with an error if keys keep their memory kind.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
"$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
replicated = NamedSharding(mesh, PartitionSpec())


def next_key(key, x):
    key = jax.random.fold_in(jax.device_put(key, DEVICE), 1)
    return jax.device_put(key, HOST), x + 1


def next_words(words, x):
    key = jax.random.wrap_key_data(jax.device_put(words, DEVICE))
    words = jax.random.key_data(jax.random.fold_in(key, 1))
    return jax.device_put(words, HOST), x + 1


def run(step, random):
    random = jax.device_put(jax.device_put(random, replicated), replicated.with_memory_kind("pinned_host"))
    x, kinds = jax.device_put(jnp.zeros(4, jnp.bfloat16), replicated), []
    compiled = jax.jit(step, donate_argnums=(0, 1))
    try:
        for _ in range(3):
            random, x = compiled(random, x)
            kinds.append(random.sharding.memory_kind)
    except ValueError as error:
        kinds.append(str(error)[:41])
    return kinds


key = jax.random.key(0)
found = {"words": run(next_words, jax.random.key_data(key)), "key": run(next_key, key)}
print(found)
assert found["words"] == ["pinned_host"] * 3
assert found["key"] == ["device", "device", "FAILED_PRECONDITION: Memory kind mismatch"]
PY
