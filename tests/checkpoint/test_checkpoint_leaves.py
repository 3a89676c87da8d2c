"""Leaves of every kind: none changes its bits, its type or its freedom without a word."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist.checkpoint import _manifest


def again(folder, state, like=None):
    checkpoint.save(folder, state, 0)
    return checkpoint.restore(folder, state if like is None else like)


def test_leaves_without_a_place_stay_free(tmp_path, mesh):
    """They go onto whatever mesh the step has; pinned to a device they would not meet the others."""
    state = {"w": jd.place({"w": jnp.ones(3)}, mesh)["w"], "count": jnp.zeros((), jnp.int32), "none": jnp.zeros((0, 2))}
    state |= {"key": jax.random.key(0), "host": np.ones(2, np.float32)}
    found = again(tmp_path, state)
    assert [x.committed for x in jax.tree.leaves(found)] == [False, False, False, False, True]

    def step(state, batch):
        w = state["w"] + jax.random.normal(state["key"], (3,)) * jax.lax.pmean(batch.sum(), "data")
        return {**state, "w": w, "count": state["count"] + 1}, {}

    run = jd.distribute(step, mesh, donate=False)
    batch = jnp.arange(8.0)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), run(found, batch)[0], run(state, batch)[0]))


def test_numbers_without_a_type_stay_so(tmp_path):
    """A rate of 0.1 times bfloat16 is bfloat16; as an array of float32 it would make float32 of it."""
    state = {"rate": jnp.asarray(0.1), "python": 0.1, "count": 3, "flag": True, "typed": jnp.float32(0.1)}
    found = again(tmp_path, state)
    assert {name: x.weak_type for name, x in found.items()} == {
        "rate": True,
        "python": True,
        "count": True,
        "flag": False,
        "typed": False,
    }
    assert (found["rate"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["python"], np.float32(0.1))
    assert (int(found["count"]), bool(found["flag"])) == (3, True)


def test_what_would_change_is_refused_by_name(tmp_path):
    """A position in the data of 2**40 came back as 0."""
    for message, leaf in {
        r"leaf `a\.b` is a NumPy array of int64, .* convert to int32: cast it": np.asarray(2**40),
        r"NumPy array of float64, .* float32": np.float64(0.1),
        r"leaf `a\.b` cannot be a JAX array: 1099511627776": 2**40,
        r"leaf `a\.b` cannot be a JAX array: 'text'": "text",
        r"cannot be a JAX array: array\(\[None\]": np.asarray([None]),
        r"leaf `a\.b` is uint4, which checkpoints do not support": jnp.zeros(2, jnp.uint4),
    }.items():
        with pytest.raises(ValueError, match=message):
            checkpoint.save(tmp_path, {"a": {"b": leaf}}, 0)
    with pytest.raises(ValueError, match="nothing to save"):
        checkpoint.save(tmp_path, {"none": None, "empty": jnp.zeros(0)}, 0)
    assert checkpoint.save(tmp_path, {"w": jnp.ones(1)}, np.int64(7)).name == "7"
    assert checkpoint.resume(tmp_path, {"w": jnp.ones(1)}).step == 7


NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4", "bool", "uint16"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [*NARROW, "complex64"])
def test_each_dtype_on_fewer_workers(tmp_path, dtype):
    one = np.arange(12).reshape(3, 4) % 2 + (0.5j if dtype == "complex64" else 0)
    x = jnp.asarray(one).astype(dtype)
    state = {"x": x, "own": jd.PerWorker(jnp.stack([x] * 4), axis="data"), "key": jax.random.key(1, impl="rbg")}
    state["cut"] = jd.Sharded(x.ravel(), shape=(3, 4), axis="data")
    like = {**state, "own": jd.PerWorker(jnp.stack([x] * 2), axis="data")}
    like["cut"] = jd.Sharded(jnp.zeros(16, dtype), shape=(3, 4), axis="data")
    found = again(tmp_path, state, like)
    for leaf in (found["x"], *found["own"].value, found["cut"].value[:12].reshape(3, 4)):
        assert leaf.dtype == x.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(x).tobytes()
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(state["key"])).all()


def test_names_of_every_kind(tmp_path):
    texts = ["", "a/0", "a", "a/.zarray", "/", "..", "../x", "\n", "\0", "日本", "a\\b", "%2F", "_METADATA", "x" * 3000]
    state = {text: jnp.full(3, float(number)) for number, text in enumerate(texts)}
    pair = collections.namedtuple("pair", "left right")
    state |= {"tree": {1: pair(jnp.ones(1), None), 20: [jnp.zeros(1), (jnp.full(1, 2.0),)]}}
    deep = jnp.ones(1)
    for _ in range(200):
        deep = {"k": deep}
    found = again(tmp_path, {**state, "deep": deep})
    assert jax.tree.structure(found) == jax.tree.structure({**state, "deep": deep})
    assert [found[text].tolist() for text in texts] == [[float(number)] * 3 for number in range(len(texts))]
    with pytest.raises(ValueError, match="two leaves have the name `state`"):
        checkpoint.save(tmp_path, {"": jnp.ones(1), "state": jnp.ones(1)}, 1)


def test_states_of_flax_and_optax(tmp_path):
    flax = pytest.importorskip("flax")
    nnx = pytest.importorskip("flax.nnx")
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    tx = optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "b": False}),
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1, 0, 10)),
        optax.add_noise(0.1, 0.1, 3),
    )
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    state = {"linen": flax.core.freeze(params), "opt": optax.MultiSteps(tx, 2).init(params), "nnx": nnx.state(model)}
    found = again(tmp_path, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert {"nnx.layers.0.kernel.value", "linen.w"} < checkpoint.load(tmp_path).state.keys()
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert (old.dtype, old.weak_type) == (new.dtype, new.weak_type) if hasattr(old, "weak_type") else True
        words = jax.random.key_data if jnp.issubdtype(old.dtype, jax.dtypes.prng_key) else np.asarray
        np.testing.assert_array_equal(words(old), words(new))


def test_packed_codes_in_the_order_of_another_version_are_refused_by_name(tmp_path, monkeypatch):
    params = jnp.zeros(4096)
    packed = jd.transforms.quantized_state(optax.sgd(0.1, momentum=0.9), jd.compressors.natural())
    whole = jd.transforms.quantized_state(optax.sgd(0.1, momentum=0.9))
    with monkeypatch.context() as patch:
        patch.setattr(_manifest, "PACKING", 1)
        for name, tx in (("packed", packed), ("whole", whole)):
            checkpoint.save(tmp_path / name, jax.jit(tx.init)(params), 0)
    # Bytes that are codes by themselves are read.
    checkpoint.restore(tmp_path / "whole", jax.jit(whole.init)(params))
    with pytest.raises(ValueError, match=r"payload\.signs.* has packed codes in the order of another version"):
        checkpoint.restore(tmp_path / "packed", jax.jit(packed.init)(params))
