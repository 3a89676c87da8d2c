"""ZeRO on the chips of each pod, and something else between pods: on a mesh what it is in simulation."""

import jax.numpy as jnp
import optax
import pytest
from problems import TrainState, assert_close, batch, loss, params

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.local_sgd import noloco
from jaxdist.zero import shards

BOTH = ("pod", "chip")
PODS = {"pod": 2, "chip": 4}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
BETWEEN = {
    "diloco": lambda inner: jd.local_steps(inner, NESTEROV, sync_period=2, axis="pod"),
    "streaming": lambda inner: jd.local_steps(
        inner, NESTEROV, sync_period=4, fragments=2, delay=1, merge_alpha=0.5, axis="pod"
    ),
    "noloco": lambda inner: noloco(inner, sync_period=2, axis="pod"),
    "gossip": lambda inner: jd.gossip(inner, jd.topology.ring(2), axis="pod"),
    "carried": lambda inner: jd.gossip(inner, jd.topology.ring(2), axis="pod", carriers="chip"),
    "coded gossip": lambda inner: jd.gossip(
        inner, jd.topology.ring(2), axis="pod", method=jd.decentralized.choco(jc.int8(), step_size=0.5)
    ),
}
# Adam with a sum of all leaves; factors and loops of whole leaves; branches; codes; another state.
INSIDE = {
    "clipped": lambda stage: jd.zero_redundancy(CLIPPED, stage=stage, axis="chip"),
    "adafactor": lambda stage: jd.zero_redundancy(
        optax.adafactor(1e-2, min_dim_size_to_factor=2), stage=stage, axis="chip"
    ),
    "muon": lambda stage: jd.zero_redundancy(optax.contrib.muon(1e-2), stage=stage, axis="chip"),
    "branches": lambda stage: jd.zero_redundancy(optax.apply_if_finite(optax.lamb(1e-2), 3), stage=stage, axis="chip"),
    "codes": lambda stage: jd.zero_redundancy(
        optax.adam(1e-2), stage=stage, reducer=jd.two_shot(jc.int8()), compressor=jc.int8(), axis="chip"
    ),
    "master": lambda stage: jd.zero_redundancy(CLIPPED, stage=stage, master_dtype=jnp.float32, axis="chip"),
}


def step_of(tx):
    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss, axis=BOTH)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def placed(tx, place):
    return jd.place(TrainState(jd.PerWorker(params(), axis="pod"), tx.init(params())), place, axis=BOTH)


CASES = [("diloco", "clipped", 1), ("gossip", "clipped", 2)]
MORE = [
    *((between, "clipped", stage) for between in BETWEEN for stage in (1, 2)),
    *((between, inside, 1) for between in ("diloco", "gossip") for inside in INSIDE if inside != "clipped"),
]


@pytest.mark.parametrize(
    ("between", "inside", "stage"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in CASES)],
)
def test_mesh_and_simulation_agree(between, inside, stage, pods, monkeypatch):
    """In stage 2 each leaf has a bucket of its own."""
    monkeypatch.setattr(shards, "BUCKET_BYTES", 8)
    tx = BETWEEN[between](INSIDE[inside](stage))
    state, simulated = placed(tx, pods), placed(tx, PODS)
    step, simulate = jd.distribute(step_of(tx), pods, axis=BOTH), jd.simulate(step_of(tx), PODS, axis=BOTH)
    for number in range(5):
        state, _ = step(state, batch(seed=number))
        simulated, _ = simulate(simulated, batch(seed=number))
    assert_close(state.params, simulated.params)
    assert_close(state.opt.inner, simulated.opt.inner)
    assert float(jnp.abs(state.params.value["w"] - params()["w"][None]).max()) > 1e-3
    assert jd.runtime.disagreement(state, pods, axis=BOTH) == ()


@pytest.mark.parametrize(
    "nest",
    [
        lambda zero: jd.local_steps(zero, NESTEROV, sync_period=2),
        lambda zero: noloco(zero, sync_period=2),
        lambda zero: jd.gossip(zero, jd.topology.ring(8)),
        lambda zero: jd.local_steps(
            optax.chain(jd.transforms.per_worker(optax.trace(0.9)), zero), NESTEROV, sync_period=2
        ),
    ],
)
def test_one_axis_twice_is_refused(nest):
    with pytest.raises(ValueError, match=r"leaf over axis data is inside a PerWorker one.*axis='chip'\) inside local_"):
        nest(jd.zero_redundancy(optax.adam(1e-2))).init(params())


def test_parameters_that_differ_are_refused(mesh):
    tx = jd.zero_redundancy(optax.adam(1e-2))

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(jd.PerWorker(params()), tx.init(params())), mesh)
    with pytest.raises(
        ValueError, match=r"parameter \['b'\] differs between workers of axis 'data'.*one model for all"
    ):
        jd.distribute(step, mesh)(state, batch())


def test_what_it_is_told_must_be_agreed(mesh):
    tx = jd.zero_redundancy(optax.polyak_sgd())

    def step(state, data):
        value, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params, value=value)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(params(), tx.init(params())), mesh)
    with pytest.raises(ValueError, match=r"value= differs between workers of axis 'data'.*pmean\(value, 'data'\)"):
        jd.distribute(step, mesh)(state, batch())
