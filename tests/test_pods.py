"""Compiling for machines that are not here."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist.analysis import pods


def step(state, batch):
    new = {"total": state["total"] + jax.lax.psum(batch.sum(), "data"), "own": state["own"], "cut": state["cut"]}
    return new, {"mean": jax.lax.pmean(batch.mean(), "data")}


def make_state():
    return {"total": jnp.zeros(()), "own": jd.PerWorker(jnp.ones(3)), "cut": jd.Sharded(jnp.ones(5), multiple=8)}


def test_abstract_is_what_would_be_placed(mesh):
    """The shapes and shardings of `init_state`, without its arrays; and the plan is of the program that then runs."""
    batch = np.ones((16, 4), np.float32)
    state, shapes = pods.abstract(make_state, batch, mesh)
    real = jd.init_state(make_state, mesh)

    def same(x, y):
        return x.shape == y.shape and x.dtype == y.dtype and x.sharding.is_equivalent_to(y.sharding, x.ndim)

    assert jax.tree.structure(state) == jax.tree.structure(real)
    assert all(jax.tree.leaves(jax.tree.map(same, state, real)))
    assert shapes.sharding.shard_shape(shapes.shape) == (2, 4)
    distributed = jd.distribute(step, mesh)
    plan = pods.plan(distributed, make_state, batch, mesh)
    assert plan.memory == jd.analysis.memory(distributed.lower(real, jd.global_batch(batch, mesh)).compile())
    assert plan.memory.arguments == 4 + 3 * 4 + 8 * 4 + 2 * 4 * 4
    assert [op.kind for op in plan.collectives.ops] == ["all-reduce"] * len(plan.collectives.ops) != []


def test_host_memory_and_batch_specs():
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    state, batch = pods.abstract(
        lambda: jd.OnHost(jd.Sharded(jnp.ones(16))),
        {"x": jnp.ones((3, 4)), "y": jnp.ones(4)},
        mesh,
        batch_specs={"x": jax.P(None, "data"), "y": jax.P("data")},
    )
    assert state.value.value.sharding.memory_kind == "pinned_host"
    assert batch["x"].sharding.shard_shape((3, 4)) == (3, 2)
    assert batch["y"].sharding.shard_shape((4,)) == (2,)


def test_refusals(mesh):
    with pytest.raises(ValueError, match="the mesh has no axis 'pod'"):
        pods.abstract(make_state, jnp.ones(8), mesh, axis="pod")
    with pytest.raises(ValueError, match="cannot describe the TPU topology 'nonsense'"):
        pods.tpu("nonsense")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")
def test_tpu():
    mesh = pods.tpu("v5e:2x4")
    plan = pods.plan(jd.distribute(step, mesh), make_state, jax.ShapeDtypeStruct((16, 4), jnp.float32), mesh)
    assert plan.collectives.wire_bytes == 2 * 7 / 8 * 8
    assert plan.memory.arguments > 0
    with pytest.raises(ValueError, match="do not make up the 8 devices"):
        pods.tpu("v5e:2x4", {"data": 4})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")
def test_tpu_collectives_keep_their_bytes():
    """Neither a gather nor a reduce-scatter becomes an all-reduce, also where the pieces do not fill tiles."""
    mesh, entries, dtype = pods.tpu("v5e:2x4"), 100_008, jnp.bfloat16

    def exchanged(state, batch):
        comm = jd.comm.over("data")
        mean = comm.reduce_scatter_mean(batch.reshape(comm.size, -1))
        return state + comm.all_gather(mean).sum(0), {}

    batch = jax.ShapeDtypeStruct((mesh.size**2 * entries,), dtype)
    found = pods.plan(jd.distribute(exchanged, mesh), lambda: jnp.zeros(entries, dtype), batch, mesh).collectives
    assert {op.kind for op in found.ops} == {"all-gather", "reduce-scatter"}
    ideal = 2 * (mesh.size - 1) * entries * 2
    assert ideal <= found.wire_bytes < 1.05 * ideal
