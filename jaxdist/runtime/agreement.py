"""Compares replicated state between workers by value, for steps whose types cannot be checked."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .._core.compat import shard_map
from .._core.trees import leaf_name
from .._core.types import Array, AxisNames, State, UInt
from ..comm.over import over
from ..state.marks import axis_tuple, bind, is_mark

CHECK_EVERY = 100


def disagreement(state: State, mesh: Mesh, *, axis: AxisNames = "data") -> tuple[str, ...]:
    """Returns the names of replicated leaves whose values differ between workers.

    Args:
      state: a placed state; marked leaves may differ and are not compared.
      mesh: its mesh.
      axis: the axis or axes of the workers.

    Returns:
      The names; empty if nothing differs. All processes must call it together.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> jd.runtime.disagreement(jd.place({"w": jnp.ones(3)}, mesh), mesh)
      ()
    """
    named = jax.tree_util.tree_flatten_with_path(bind(state, axis), is_leaf=is_mark)[0]
    named = [(leaf_name(path), leaf) for path, leaf in named if not is_mark(leaf)]
    if not named:
        return ()
    hashes = np.asarray(_hashes(mesh, axis_tuple(axis))([leaf for _, leaf in named]))
    return tuple(name for (name, _), row in zip(named, hashes.T, strict=True) if len(set(row.tolist())) > 1)


@functools.cache
def _hashes(mesh: Mesh, axes: tuple[str, ...]) -> Callable[[list[Array]], Array]:
    """Compiles a function that gathers every worker's hash of its own copy of each leaf, as `[W, leaves]`."""

    def gather_hashes(leaves):
        return over(axes).all_gather(jnp.stack([hash_array(leaf) for leaf in leaves]))

    # The leaves are typed as equal, so JAX moves nothing: each worker hashes the copy that it really has.
    mapped = shard_map(
        gather_hashes,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=True,
    )
    return jax.jit(mapped)


def hash_array(x: Array) -> UInt[Array, ""]:
    """Hashes the bits of an array of any dtype to 32 bits: a sum of mixed words, which does not depend on its order."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    words = lax.bitcast_convert_type(x, width).astype(jnp.uint32).ravel()
    # Mix each word with its position, so that permuted entries have another hash.
    position = jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    mixed = (words ^ position) * jnp.uint32(0x85EBCA6B)
    return jnp.sum((mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35), dtype=jnp.uint32)


def with_value_checks(run: Any, mesh: Mesh, axis: AxisNames) -> Any:
    """Wraps a compiled step with a comparison after the first call and after every `CHECK_EVERY`-th."""
    calls = 0

    @functools.wraps(run)
    def run_and_check(state, batch, **static):
        nonlocal calls
        state, metrics = run(state, batch, **static)
        if calls % CHECK_EVERY == 0:
            names = disagreement(state, mesh, axis=axis)
            if names:
                raise ValueError(
                    f"replicated state differs between workers after call {calls + 1}: {', '.join(names)}; reduce it "
                    "before it enters the state, or mark it PerWorker"
                )
        calls += 1
        return state, metrics

    # As callers of a compiled function expect.
    for name in ("lower", "trace"):
        setattr(run_and_check, name, getattr(run, name))
    return run_and_check
