"""Partitions in an order that the compiler keeps: read from compiled programs, and the same bits as one mean."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist.schedule import Profile, timeline

WORKERS = 4
SHAPES = {"block_10": {"w": (4, 12)}, "block_2": {"b": (5,), "w": (9, 11)}, "block_1": {"w": (24,)}}
LIKE = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
# Layers 0, 1, 2 have 24, 104 and 48 entries: in partitions of 40 these.
PARTS = [[24], [40, 40, 24], [40, 8]]
PARTITION = 4 * 40


def batches(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal((WORKERS, *x.shape)).astype(np.float32), LIKE)


def reduced(reducer, mesh):
    """The step that reduces once, and its compiled program."""

    def step(state, batch):
        out, _ = reducer.reduce(jax.tree.map(lambda x: x[0], batch), state, jd.comm.over("data"))
        return state, out.mean

    run = jd.distribute(step, mesh, donate=False)
    return run.lower(reducer.init(LIKE), batches()).compile()


def sizes(compiled):
    """Entries of the all-reduces in the order in which they are scheduled."""
    text = compiled.as_text()
    assert "is_scheduled=true" in text
    merged = re.findall(r"= (\S+|\(.*\)) all-reduce(?:-start)?\(", text)
    entries = [re.findall(r"f32\[([\d,]+)\]", shapes) for shapes in merged]
    return [sum(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes) for shapes in entries]


@pytest.fixture(scope="module")
def four():
    return jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])


@pytest.fixture(scope="module")
def plain(four):
    return reduced(jd.exact(), four)


@pytest.fixture(scope="module")
def prioritised(four):
    reducer = jd.reducers.partitioned(jd.exact(), partition_bytes=PARTITION, credit_bytes=PARTITION, order="priority")
    return reduced(reducer, four)


def planned():
    """What a priority queue makes of gradients that become ready last layer first."""
    profile = Profile([6, 4, 2], [4 * sum(parts) for parts in PARTS], [1, 1, 1])
    played = timeline(profile, bandwidth=64, partition_bytes=PARTITION, credit_bytes=PARTITION)
    return [message.layer for message in played.messages]


def test_without_a_chain_the_compiler_merges_all(four):
    """The negative: independent partitions become one message, in an order of the compiler's."""
    leaves = jd.reducers.bucketed(jd.exact(), bucket_bytes=PARTITION, first_bucket_bytes=None)
    assert sizes(reduced(leaves, four)) == [176]


def test_first_layers_go_first(prioritised):
    assert sizes(prioritised) == [24, 40, 40, 24, 40, 8]


def test_last_layers_go_first(four):
    """By default: what the backward pass makes first, and nothing waits for the gradient of layer 0."""
    reducer = jd.reducers.partitioned(jd.exact(), partition_bytes=PARTITION, credit_bytes=3 * PARTITION)
    assert sizes(reduced(reducer, four)) == [40, 8, 40, 40, 24, 24]


def test_the_order_of_a_timeline_is_the_order_on_the_wire(four):
    order = planned()
    assert order == [2, 1, 0, 1, 1, 2]
    reducer = jd.reducers.partitioned(jd.exact(), partition_bytes=PARTITION, order=order)
    assert sizes(reduced(reducer, four)) == [40, 40, 24, 40, 24, 8]


def test_values_are_those_of_one_mean_bit_for_bit(plain, prioritised):
    batch = batches(1)
    batch["block_2"]["w"][1, 0, :3] = np.nan, np.inf, -np.inf
    batch["block_1"]["w"][0] = np.nan  # all that the first partition says to the others
    (_, wanted), (_, found) = plain((), batch), prioritised(6 * ((),), batch)
    for one, two in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.int32), np.asarray(two).view(np.int32))
    assert np.isnan(found["block_1"]["w"]).all()
    assert np.isfinite(found["block_10"]["w"]).all()


def test_layers_are_whom_the_user_says():
    """Leaves of one number are one layer, whatever their dtype; empty ones send nothing."""
    like = {
        "a": jax.ShapeDtypeStruct((3,), jnp.float32),
        "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        "c": jax.ShapeDtypeStruct((0,), jnp.float32),
        "d": jax.ShapeDtypeStruct((4, 5), jnp.float32),
    }
    code = jd.compressed(jd.compressors.scaled_sign())
    layers = {"a": 1, "b": 1, "c": 0, "d": 0}
    reducer = jd.reducers.partitioned(
        jd.error_feedback(code), partition_bytes=48, layer_fn=lambda path, leaf: layers[path], order=[0, 1, 1, 0, 0]
    )
    states = reducer.init(like)
    assert [state.residual.value.shape for state in states] == [(8,), (3,), (3,), (8,), (4,)]

    def one_worker(x):
        return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean

    both = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), like)
    assert jax.eval_shape(jax.vmap(one_worker, axis_name="data"), both) == both


def sent_sizes(tree, **options):
    """Entries of each message, in order."""
    reducer = jd.reducers.partitioned(jd.error_feedback(jd.compressed(jd.top_k(0.5))), **options)
    return [state.residual.value.size for state in reducer.init(tree)]


class Model(NamedTuple):
    stem: jax.Array
    body: jax.Array
    head: jax.Array


def test_layers_have_the_order_of_the_forward_pass():
    """That of the alphabet has the embedding, whose gradient is ready last, before `head`."""
    tree = {"embedding": jnp.zeros(1), "block_2": jnp.zeros(3), "block_10": jnp.zeros(4), "head": jnp.zeros(5)}
    assert sent_sizes(tree) == [5, 1, 4, 3]
    assert sent_sizes({"params": tree}, layers=["embedding", "block_2", "block_10", "head"]) == [5, 4, 3, 1]
    assert sent_sizes(tree, layers=[("embedding", "block_2"), "block_10", "head"]) == [5, 4, 4]
    assert sent_sizes(Model(jnp.zeros(1), jnp.zeros(2), jnp.zeros(3))) == [3, 2, 1]
    with pytest.raises(ValueError, match="layers names 'head', but the parameters have 'block_10'"):
        sent_sizes(tree, layers=["head"])
    with pytest.raises(ValueError, match="pass one of them"):
        sent_sizes(tree, layers=["head"], layer_fn=lambda path, leaf: 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition_bytes": 0}, "partition_bytes must be at least 1, got 0"),
        ({"credit_bytes": -3}, "credit_bytes must be at least 1, got -3"),
        ({"order": [0, 1, 1, 2]}, r"\{0: 1, 1: 3, 2: 2\}, but names \{0: 1, 1: 2, 2: 1\}"),
        ({"order": [0, 1, 1, 1, 2, 2, 7]}, "7: 0}, but names"),
    ],
)
def test_what_cannot_be_ordered_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        jd.reducers.partitioned(jd.exact(), **{"partition_bytes": PARTITION, **change}).init(LIKE)
