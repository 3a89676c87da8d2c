#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on CPU.
# In a jax.shard_map over one axis of a mesh, another one over a second axis may close over a value of the first. One
# expects that to be the same as a further argument with the spec P(). It is, as long as each operation on that value also
# has an argument of the inner map: x * n. An operation on it alone, n + 1, n > 1 or jnp.exp(n), is refused:
# "For primitive add, context mesh ... should match the aval mesh ...", since its type still has the mesh of the outer map,
# in which the second axis is not mapped yet. So a learning rate or a number of examples must be passed as an argument.
# Exits with an error if closures come to work, or arguments do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/nested.py" <<'PY'
import jax
import jax.numpy as jnp
from jax import P

kinds = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("slow", "fast"), axis_types=kinds)


def run(f, closes):
    def outer(x, n):
        number, maps = n[0], {"out_specs": P("fast"), "axis_names": {"fast"}}
        if closes:
            return jax.shard_map(lambda x: f(x, number), in_specs=P("fast"), **maps)(x)
        return jax.shard_map(f, in_specs=(P("fast"), P()), **maps)(x, number)

    specs = {"in_specs": (P(), P("slow")), "out_specs": P("slow"), "axis_names": {"slow"}}
    with jax.set_mesh(mesh):
        return jax.jit(jax.shard_map(outer, mesh=mesh, **specs))(jnp.arange(4.0), jnp.array([1.0, 2.0])).tolist()


cases = {"x * n": lambda x, n: x * n, "x * (n + 1)": lambda x, n: x * (n + 1), "x * exp(n)": lambda x, n: x * jnp.exp(n)}
for name, f in cases.items():
    try:
        found = "the same" if run(f, closes=True) == run(f, closes=False) else "other numbers"
    except ValueError as error:
        assert "should match the aval mesh" in str(error), error
        found = "refused"
    print(jax.__version__, name, "as a closure:", found)
    assert found == ("the same" if name == "x * n" else "refused")
PY
for version in 0.10.2 0.12.0.1; do
  "${PYTHON:-python3.13}" -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q --disable-pip-version-check "jax==$version" "jaxlib==$version" numpy
  JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$folder/$version/bin/python" "$folder/nested.py"
done
