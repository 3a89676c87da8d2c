"""BAGUA's algorithms on a mesh: their bytes, what they wait for, and nodes that act as one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference.blocks import min_max

import jaxdist as jd
from jaxdist.analysis import hlo_reader
from jaxdist.recipes import bagua

WORKERS = 4
# Leaves of 1000 and 24 entries.
ENTRIES = 1024
AXES = ("pod", "chip")


class State(NamedTuple):
    params: Any
    opt: Any


def params():
    return {"b": jnp.zeros(24), "w": jnp.full((40, 25), 0.5)}


def batch(seed=0):
    """A target for each of eight devices."""
    rng = np.random.default_rng(seed)
    return {"b": rng.normal(size=(8, 24)).astype(np.float32), "w": rng.normal(size=(8, 40, 25)).astype(np.float32)}


def make(tx, axis: str | tuple[str, ...] = "data"):
    """A step that sends nothing by itself."""

    def loss(x, target):
        apart = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a[None] - b)) / (2 * len(b)), x, target)
        return apart["b"] + apart["w"]

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss, axis=axis)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), {}

    return step


def start(tx, place, differ, axis: str | tuple[str, ...] = "data"):
    """Parameters that `differ` do so along that axis."""
    held = jd.PerWorker(params(), axis=differ) if differ else params()
    return jd.place(State(held, tx.init(params())), place, axis=axis)


def chunked(n, workers):
    """What a code of min-max uint8 sends of `n` entries in two shots: chunks of whole eights, and 8 bytes each."""
    return 2 * (workers - 1) * (8 + 8 * -(-n // (8 * workers)))


SGD = optax.sgd(0.1)
# transformation, along which axis parameters differ, bytes that one of four workers sends in a step that talks
ALGORITHMS = {
    "gradient_allreduce": (bagua.gradient_allreduce(SGD), "", 2 * 3 / 4 * 4 * ENTRIES),
    "bytegrad": (bagua.bytegrad(SGD), "", chunked(ENTRIES, 4)),
    "qadam": (bagua.qadam(0.1, warmup_steps=1, bucket_bytes=None), "", chunked(ENTRIES, 4)),
    "decentralized": (bagua.decentralized(SGD, 4), "data", 2 * 3 / 4 * 4 * ENTRIES),
    "shift_one": (bagua.decentralized(SGD, 4, peers="shift_one", interval=2), "data", 4 * ENTRIES),
    "low_precision": (bagua.low_precision_decentralized(SGD, 4), "data", 2 * (ENTRIES + 2 * 8)),
    "async": (bagua.async_model_average(SGD, sync_period=2), "data", 2 * 3 / 4 * 4 * ENTRIES),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_wire_is_what_the_table_says(name):
    tx, differ, expected = ALGORITHMS[name]
    mesh = jd.make_mesh({"data": WORKERS})
    state = start(tx, mesh, differ)
    compiled = jd.distribute(make(tx), mesh, donate=False).lower(state, batch()).compile()
    found = jd.analysis.collectives(compiled)
    rest = jd.analysis.collectives(compiled, branch="min")
    if name == "qadam":  # the dearer branch is the warm-up
        found, rest = rest, found
        assert rest.wire_bytes == 2 * 3 / 4 * 4 * ENTRIES
    assert found.wire_bytes == expected
    if name in ("shift_one", "async"):  # steps that do not talk
        assert not rest.ops
    if name in ("bytegrad", "qadam", "low_precision"):
        assert {op.dtype for op in found.ops} == {"uint8"}
    if name in ("shift_one", "low_precision", "async"):
        compare(tx, compiled, state, replicas=name == "low_precision")


def compare(tx, compiled, state, *, replicas):
    """The mesh is the simulation; and replicas are right, where there are any."""
    simulated, simulation = start(tx, WORKERS, "data"), jd.simulate(make(tx), WORKERS)
    for i in range(4):
        state, simulated = compiled(state, batch(i))[0], simulation(simulated, batch(i))[0]
        for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(simulated.params), strict=True):
            # A code rounded the other way is off by a step, of less than 5/255.
            np.testing.assert_allclose(x, y, atol=0.02 if replicas else 1e-5)
        if replicas:
            check_replicas(state)


def check_replicas(state):
    """What a worker has of its neighbors is what they have of themselves, in every bit."""
    (one,) = jd.topology.ring(WORKERS).rounds
    for replicas, x in zip(jax.tree.leaves(state.opt.method.value), jax.tree.leaves(state.params), strict=True):
        replicas, own = np.asarray(replicas), np.asarray(x)
        np.testing.assert_array_equal(replicas[:, 0], own)
        assert len(np.unique(own.reshape(WORKERS, -1)[:, 0])) == WORKERS
        for k, message in enumerate(one.messages, start=1):
            for source, destination in message.pairs:
                np.testing.assert_array_equal(replicas[destination, k], own[source])


@pytest.mark.parametrize(
    ("name", "waits"), [("decentralized", False), ("async", False), ("low_precision", True), ("shift_one", False)]
)
def test_models_travel_without_waiting_for_the_gradient(name, waits):
    """Codes of differences wait for it: they hold the step."""
    tx = ALGORITHMS[name][0]
    given = {"async": {"sync": True}, "shift_one": {"round": 1}}.get(name, {})

    def update(updates, state, params=None):
        return tx.update(updates, state, params, **given)

    talking = optax.GradientTransformation(tx.init, update)
    mesh = jd.make_mesh({"data": WORKERS})
    compiled = jd.distribute(make(talking), mesh, donate=False).lower(start(tx, mesh, "data"), batch()).compile()
    module = hlo_reader.parse(hlo_reader.program_text(compiled))
    body = module.computations[module.entry].instructions
    sent = [one.name for one in body.values() if one.opcode in ("all-reduce", "collective-permute")]
    assert sent
    before, new = set(), set(sent)
    while new:
        before |= new
        new = {operand for name in new for operand in body[name].operands if operand in body} - before
    needed = [body[name].attributes for name in before if body[name].opcode == "parameter"]
    assert any("state.params" in attributes for attributes in needed)
    assert any("batch" in attributes for attributes in needed) == waits


def test_nodes_act_as_one(pods):
    """Two nodes of four: codes of quarters of a model cross between them."""
    tx = bagua.low_precision_decentralized(SGD, 2, hierarchical=True, axis=AXES)
    state = start(tx, pods, "pod", AXES)
    compiled = jd.distribute(make(tx, AXES), pods, axis=AXES, donate=False).lower(state, batch()).compile()
    across = [op for op in jd.analysis.collectives(compiled).ops if op.kind == "collective-permute"]
    assert [(op.dtype, op.bytes) for op in across] == [("uint8", (ENTRIES + 2 * 8) // 4)]
    # Both nodes in float64: each half of the other's model.
    x = known = [np.stack([leaf, leaf]) for leaf in jax.tree.leaves(params())]
    for i in range(3):
        state = compiled(state, batch(i))[0]
        drawn = [leaf.reshape(2, 4, *leaf.shape[1:]).mean(1) for leaf in jax.tree.leaves(batch(i))]
        news = [p - 0.1 * (p - b) + (w[::-1] - w) / 2 - w for p, b, w in zip(x, drawn, known, strict=True)]
        coded = [np.stack([min_max(row.ravel())[1].reshape(row.shape) for row in leaf]) for leaf in news]
        x = known = [w + c for w, c in zip(known, coded, strict=True)]
    for found, expected in zip(jax.tree.leaves(state.params), x, strict=True):
        np.testing.assert_allclose(found, expected, atol=0.01)  # a step of a code


def test_a_node_takes_the_step_of_its_active_workers(pods):
    """Of four workers two have a gradient, and of the other node none: it only averages."""
    tx = bagua.decentralized(SGD, 2, hierarchical=True, axis=AXES)

    def loss(x, target):
        return sum(
            jnp.sum(jnp.square(a[None] - b)) / 2 for a, b in zip(*map(jax.tree.leaves, (x, target)), strict=True)
        )

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss, axis=AXES)(state.params, data)
        active = (jax.lax.axis_index("pod") == 0) & (jax.lax.axis_index("chip") < 2)
        updates, opt = tx.update(gradient, state.opt, state.params, active=active)
        return State(optax.apply_updates(state.params, updates), opt), {}

    state = start(tx, pods, "pod", AXES)
    run = jd.distribute(step, pods, axis=AXES)
    expected = [np.stack([leaf, leaf]) for leaf in jax.tree.leaves(params())]
    for i in range(3):
        state, _ = run(state, batch(i))
        steps = [0.1 * (x[0] - b[:2].mean(0)) for x, b in zip(expected, jax.tree.leaves(batch(i)), strict=True)]
        expected = [np.stack([x.mean(0) - s, x.mean(0)]) for x, s in zip(expected, steps, strict=True)]
    for found, leaf in zip(jax.tree.leaves(state.params), expected, strict=True):
        np.testing.assert_allclose(found, leaf, atol=1e-5)


@pytest.mark.slow
def test_codes_between_nodes_are_of_shards(pods):
    """ByteGrad with feedback on two levels: bytes between nodes are those of a quarter; twelve means are exact ones."""
    tx = bagua.bytegrad(SGD, feedback=True, hierarchical=True, axis=AXES)
    state = start(tx, pods, "", AXES)
    compiled = jd.distribute(make(tx, AXES), pods, axis=AXES, donate=False).lower(state, batch()).compile()
    ops = jd.analysis.collectives(compiled).ops
    assert sum(op.wire_bytes for op in ops if op.group_size == 2) == chunked(ENTRIES // 4, 2)
    assert {op.dtype for op in ops if op.group_size == 2} == {"uint8"}
    expected, grounds = params(), batch()
    for _ in range(12):
        state = compiled(state, batch())[0]
        expected = jax.tree.map(lambda x, b: x - 0.1 * (x - b.mean(0)), expected, grounds)
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        bagua.gradient_allreduce(SGD, hierarchical=True, axis=AXES),
        bagua.qadam(0.01, warmup_steps=2, hierarchical=True, axis=AXES),
        bagua.async_model_average(SGD, sync_period=2, reducer=bagua.c_lp_s(hierarchical=True), axis=AXES),
        bagua.decentralized(SGD, 2, peers="shift_one", hierarchical=True, axis=AXES),
    ],
)
def test_the_others_work_on_two_levels(tx, pods):
    differ = {"GossipState": "pod", "LocalStepsState": AXES}
    kind = next((axis for name, axis in differ.items() if name in str(jax.eval_shape(tx.init, params()))), "")
    on_mesh, simulated = (start(tx, place, kind, AXES) for place in (pods, dict(pods.shape)))
    step, simulation = jd.distribute(make(tx, AXES), pods, axis=AXES), jd.simulate(make(tx, AXES), dict(pods.shape))
    for i in range(5):
        on_mesh, simulated = step(on_mesh, batch(i))[0], simulation(simulated, batch(i))[0]
    for x, y in zip(jax.tree.leaves(on_mesh.params), jax.tree.leaves(simulated.params), strict=True):
        np.testing.assert_allclose(x, y, atol=0.02)
