"""Every registered state in the hands of those who know nothing of it: orbax by itself, and flax's serialization."""

import importlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import serialization
from injected_methods import ALONE, METHODS
from optimizers_run import OPTIMIZERS
from problems import assert_close, batch, fresh, make_step
from register import CASES
from register_run import params

import jaxdist as jd
from jaxdist.state import flax_marks

RING = jd.topology.ring(4)
# Those that the registers lack.
OTHERS = {
    "all_reduce late": lambda: jd.all_reduce(jd.error_feedback(jd.compressed(jd.qsgd(2))), delay=1),
    "accumulate": lambda: jd.accumulate(jd.all_reduce(jd.exact()), 2),
    "quantized_state": lambda: jd.transforms.quantized_state(optax.adam(0.1)),
    "dynamic_loss_scale": lambda: jd.transforms.dynamic_loss_scale(optax.adam(0.1)),
    "per_worker": lambda: jd.transforms.per_worker(optax.adam(0.1)),
    "zero_redundancy of muon": lambda: jd.zero_redundancy(optax.contrib.muon(0.1)),
    "zero_redundancy of codes": lambda: jd.zero_redundancy(optax.adam(0.1), compressor=jd.compressors.int8()),
    "host": lambda: jd.offload.host(optax.adam(0.1), delayed=True),
    "sparse_loco": lambda: jd.local_sgd.sparse_loco(optax.adam(0.1)),
    "streaming_diloco": lambda: jd.local_sgd.streaming_diloco(optax.adam(0.1), sync_period=4, fragments=2),
    "dcd_psgd": lambda: jd.gossip(optax.adam(0.1), RING, method=jd.decentralized.dcd_psgd(jd.qsgd(8))),
    "ecd_psgd": lambda: jd.gossip(optax.adam(0.1), RING, method=jd.decentralized.ecd_psgd(jd.qsgd(8))),
}
TRANSFORMATIONS = {
    **{name: lambda case=case: jd.all_reduce(case.make()) for name, case in CASES.items() if case.levels == 1},
    **{f"optimizer {name}": lambda optimizer=optimizer: optimizer.make(0.1) for name, optimizer in OPTIMIZERS.items()},
    **{f"injected {name}": make for name, make in METHODS.items()},
    **{f"alone {name}": lambda wrap=wrap: wrap(optax.adam(0.1)) for name, wrap in ALONE.items()},
    **OTHERS,
}


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def filled(state):
    """Other numbers and keys everywhere, so that nothing comes back by chance."""
    rng = np.random.default_rng(0)

    def one(x):
        if is_key(x):
            return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*x.shape, 2), np.uint32)))
        return jax.device_put((10 * rng.standard_normal(x.shape)).astype(x.dtype), x.sharding)

    return jax.tree.map(one, state)


@pytest.fixture(scope="module")
def states():
    """Four workers'; those of two levels in two pods."""
    two = {name: jd.all_reduce(case.make(), axis=("pod", "data")) for name, case in CASES.items() if case.levels == 2}
    pods = jd.place({name: tx.init(params()) for name, tx in two.items()}, {"pod": 2, "data": 2}, axis=("pod", "data"))
    plain = {name: make().init(params()) for name, make in TRANSFORMATIONS.items()}
    return {name: filled(state) for name, state in {**jd.place(plain, 4), **pods}.items()}


@pytest.mark.slow
def test_no_leaf_is_without_entries(states):
    """orbax writes no such arrays; as one worker means the states, and placed."""
    written = jax.eval_shape(lambda: {name: make().init(params()) for name, make in TRANSFORMATIONS.items()})
    for path, leaf in jax.tree_util.tree_flatten_with_path((written, states))[0]:
        assert leaf.size > 0, jax.tree_util.keystr(path)


def blank(states):
    """As a program makes them that is about to restore: zeros, and other keys."""

    def one(x):
        if is_key(x):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)))
        return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)

    return jax.tree.map(one, states)


@pytest.mark.slow
def test_orbax_by_itself(states, tmp_path):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", states)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "states", blank(states))
    assert_close(found, states, tolerance=0)


@pytest.mark.slow
def test_flax_serialization(states):
    """In bytes and back, in every bit, with the marks of the example."""
    found = serialization.from_bytes(blank(states), serialization.to_bytes(states))
    assert jax.tree.structure(found) == jax.tree.structure(states)
    assert_close(found, states, tolerance=0)


@pytest.mark.slow
def test_training_goes_on_from_bytes(mesh):
    """Numpy arrays, as flax gives them, with keys and residuals."""
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.compressed(jd.qsgd(2)))), optax.adam(0.1))
    run, state = jd.distribute(make_step(tx), mesh, donate=False), fresh(tx, mesh)
    state, _ = run(state, batch())
    found: Any = serialization.from_bytes(fresh(tx, mesh), serialization.to_bytes(state))
    assert isinstance(found.opt[0].reducer.residual.value["w"], np.ndarray)
    assert_close(run(found, batch(seed=1))[0], run(state, batch(seed=1))[0], tolerance=0)


def test_marks_are_registered_when_a_state_is_placed(monkeypatch):
    """In a new `flax.serialization`, whose register is its own. What is registered already is left alone."""
    monkeypatch.delitem(sys.modules, "flax.serialization")
    anew: Any = importlib.import_module("flax.serialization")
    assert anew is not serialization
    assert not anew.is_serializable(jd.PerWorker)
    marks = {"w": jd.OnHost(jd.PerWorker(jnp.ones(3), axis="data")), "cut": jd.Sharded(jnp.ones(3), multiple=2)}
    jd.place({"own": jd.PerWorker(jnp.ones(3))}, 2)
    assert anew.to_state_dict(marks)["w"]["value"]["value"].tolist() == [1, 1, 1]
    restored = anew.from_bytes(marks, anew.to_bytes(marks))
    assert (restored["w"].value.axis, restored["cut"].multiple) == ("data", 2)
    flax_marks.register_marks(anew)


def test_importing_the_library_leaves_the_imports_of_python_alone():
    code = "import sys, jaxdist; assert not [x for x in sys.meta_path if 'jaxdist' in repr(x)], sys.meta_path"
    subprocess.run([sys.executable, "-c", code], check=True)
