"""Compiling for machines that are not here."""

import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist.analysis import cost, pods

CUDA = "jax_plugins.xla_cuda13"


def installed(module):
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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
    with pytest.raises(ValueError, match="it must be like 'v5e:4x4', 'v5p:2x2x4' or 'tpu7x:2x2x1'"):
        pods.tpu("tpu7x")
    with pytest.raises(
        ValueError, match="cannot describe the GPU topology 'h100:32': it must be one of a100, b200, h100"
    ):
        pods.gpu("h100:32")
    for make, topology, module, extra in ((pods.tpu, "v5e:2x4", "libtpu", "tpu"), (pods.gpu, "h100:1x8", CUDA, "gpu")):
        if not installed(module):
            with pytest.raises(ValueError, match=rf"pip install '\.\[{extra}-plan\]' in a clone"):
                make(topology)


@pytest.mark.slow
@pytest.mark.skipif(not installed("libtpu"), reason="needs libtpu: pip install '.[tpu-plan]'")
def test_tpu():
    mesh = pods.tpu("v5e:2x4")
    plan = pods.plan(jd.distribute(step, mesh), make_state, jax.ShapeDtypeStruct((16, 4), jnp.float32), mesh)
    assert plan.collectives.wire_bytes == 2 * 7 / 8 * 8
    assert plan.memory.arguments > 0
    with pytest.raises(ValueError, match="do not make up the 8 devices"):
        pods.tpu("v5e:2x4", {"data": 4})


@pytest.mark.slow
@pytest.mark.skipif(not installed("libtpu"), reason="needs libtpu: pip install '.[tpu-plan]'")
@pytest.mark.parametrize("slices", [1, 2])
def test_two_devices_of_a_chip(slices):
    """They are neighbors in the mesh, with a link of their own."""
    mesh = pods.tpu("tpu7x:2x2x1", num_slices=slices)
    places = cost.of_mesh("tpu7x", mesh)
    assert [link.name for link in places.links] == ["DCN"] * (slices - 1) + ["ICI"] * 3 + ["chip"]
    chips = [place[:-1] for place in places.coordinates]
    assert chips[::2] == chips[1::2]
    assert len(set(chips)) == 4 * slices
    assert [place[-1] for place in places.coordinates] == [0, 1] * 4 * slices


@pytest.mark.slow
@pytest.mark.skipif(not installed("libtpu"), reason="needs libtpu: pip install '.[tpu-plan]'")
def test_a_device_has_half_of_the_memory_of_a_chip():
    mesh = pods.tpu("tpu7x:2x2x1")
    plan = pods.plan(jd.distribute(step, mesh), make_state, jax.ShapeDtypeStruct((16, 4), jnp.float32), mesh)
    assert plan.collectives.wire_bytes > 0
    # The compiler's own limit is the one of the chip.
    whole = jax.ShapeDtypeStruct((2**38,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as refused:
        jax.jit(jnp.sin).lower(whole).compile()
    limits = [float(number) for number in re.findall(r"([\d.]+)G", str(refused.value))]
    # 94.74 or 94.75, by the version of libtpu.
    assert pytest.approx(cost.CHIPS["tpu7x"].memory / 2**30, abs=0.02) in limits


@pytest.mark.slow
@pytest.mark.skipif(not installed("libtpu"), reason="needs libtpu: pip install '.[tpu-plan]'")
def test_several_slices_lie_along_the_first_axes():
    mesh = pods.tpu("v5e:2x2", {"pod": 2, "data": 4}, num_slices=2)
    places = cost.of_mesh("v5e", mesh)
    assert [link.name for link in places.links] == ["DCN", "ICI", "ICI", "ICI"]
    assert [place[0] for place in places.coordinates] == [0] * 4 + [1] * 4
    assert pods.tpu("v5e:2x2", num_slices=2).shape == {"slice": 2, "data": 4}
    with pytest.raises(ValueError, match="must multiply to num_slices=2"):
        pods.tpu("v5e:2x2", {"pod": 4, "data": 2}, num_slices=2)


@pytest.mark.slow
@pytest.mark.skipif(not installed(CUDA), reason="needs the CUDA plugin: pip install '.[gpu-plan]'")
def test_gpu():
    mesh = pods.gpu("h100:2x4", {"node": 2, "data": 4})
    places = cost.of_mesh("h100", mesh)
    assert places.coordinates == tuple((node, gpu) for node in range(2) for gpu in range(4))
    axis = ("node", "data")

    def step(state, batch):
        return {"total": state["total"] + jax.lax.psum(batch.sum(), axis)}, {}

    batch = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    plan = pods.plan(jd.distribute(step, mesh, axis=axis), lambda: {"total": jnp.zeros(())}, batch, mesh, axis=axis)
    assert plan.collectives.wire_bytes == 2 * 7 / 8 * 4
    assert jd.analysis.overlap(plan.compiled, places).ops[0].seconds > 0
    with pytest.raises(ValueError, match="do not make up the 8 devices"):
        pods.gpu("h100:2x4", {"data": 4})


@pytest.mark.slow
@pytest.mark.skipif(not installed("libtpu"), reason="needs libtpu: pip install '.[tpu-plan]'")
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
    # A gather is filled up to 1024 of these entries, a reduce-scatter to eight tiles of 2048.
    gathered, scattered = (-(-entries // unit) * unit for unit in (1024, 8 * 2048))
    assert found.wire_bytes == (mesh.size - 1) * (gathered + scattered) * 2
