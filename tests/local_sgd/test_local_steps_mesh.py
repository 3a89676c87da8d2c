"""Local steps on a mesh: what is on the wire between rounds and in them, for every kind of reducer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close, batch, loss, params

import jaxdist as jd
from jaxdist import analysis

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
WORKERS = 4
ENTRIES = 28
# bytes sent by one of four workers for each byte of an all-reduce
SENT = 2 * (WORKERS - 1) / WORKERS


@pytest.fixture(scope="module")
def mesh():
    return jd.make_mesh({"data": WORKERS})


def make(tx):
    def step(state, data, sync=None):
        value, gradient = jd.local_value_and_grad(loss)(state.params, data)
        given = {} if sync is None else {"sync": sync}
        updates, opt = tx.update(gradient, state.opt, state.params, **given)
        return TrainState(optax.apply_updates(state.params, updates), opt), {"loss": jax.lax.pmean(value, "data")}

    return step


def start(tx, place):
    return jd.place(TrainState(jd.PerWorker(params()), tx.init(params())), place)


def compiled(tx, mesh, **static):
    step = jd.distribute(make(tx), mesh, static_argnames=("sync",))
    return step.lower(start(tx, mesh), batch(), **static).compile()


def bytes_sent(program, branch="max"):
    return analysis.collectives(program, branch=branch).wire_bytes


# The loss is a metric and costs an all-reduce of four bytes.
METRIC = SENT * 4


@pytest.mark.slow
def test_no_byte_between_rounds(mesh):
    tx = jd.local_steps(optax.adam(0.05), NESTEROV, sync_period=8)
    program = compiled(tx, mesh)
    assert bytes_sent(program, "min") == METRIC
    assert bytes_sent(program, "max") == METRIC + SENT * 4 * ENTRIES
    assert bytes_sent(compiled(tx, mesh, sync=False)) == METRIC
    talking = compiled(tx, mesh, sync=True)
    assert bytes_sent(talking, "min") == METRIC + SENT * 4 * ENTRIES
    assert "conditional" not in talking.as_text()


def test_bfloat16_parameters_send_float32_differences(mesh):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    tx = jd.local_steps(optax.sgd(0.05), NESTEROV, sync_period=8)
    state = jd.place(TrainState(jd.PerWorker(half), tx.init(half)), mesh)
    data = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch())
    step = jd.distribute(make(tx), mesh, static_argnames=("sync",))
    found = analysis.collectives(step.lower(state, data, sync=True).compile())
    drifts = [op for op in found.ops if op.bytes > 8]
    assert [(set(np.atleast_1d(op.dtype)), op.bytes) for op in drifts] == [({"float32"}, 4 * ENTRIES + 4)]  # the metric


def test_fragments_never_send_more_than_the_largest(mesh):
    tx = jd.local_steps(optax.sgd(0.05), NESTEROV, sync_period=8, fragments=2, delay=1, merge_alpha=0.5)
    assert bytes_sent(compiled(tx, mesh, sync=(0,))) == METRIC + SENT * 4 * 24  # the matrix
    assert bytes_sent(compiled(tx, mesh, sync=(1,))) == METRIC + SENT * 4 * 4  # the vector


def test_what_is_sent_with_a_delay_does_not_wait_for_the_gradient(mesh):
    """The all-reduce depends on the state alone, so a scheduler may hide it behind the forward and backward pass."""
    tx = jd.local_steps(optax.sgd(0.05), NESTEROV, sync_period=8, delay=1)

    def dependencies(step):
        def sent(state, data):
            return step(state, data, sync=True)[0].opt.anchor

        return jax.make_jaxpr(jax.vmap(sent, axis_name="data", in_axes=(None, 0)))(
            TrainState(params(), tx.init(params())), jax.tree.map(lambda x: x[None], batch())
        )

    jaxpr = dependencies(make(tx)).jaxpr
    used: set = set(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if used & set(equation.outvars):
            used |= {x for x in equation.invars if not hasattr(x, "val")}
    data = jaxpr.invars[-2:]
    assert not used & set(data)


REDUCERS = {
    "exact": jd.exact(),
    "f16": jd.compressed(jd.compressors.cast(jnp.float16)),
    "ef:top_k": jd.error_feedback(jd.compressed(jd.top_k(0.25))),
    "ef:qsgd": jd.error_feedback(jd.compressed(jd.qsgd(4))),
    "ef:power_sgd": jd.error_feedback(jd.power_sgd(2)),
    "ef:two_shot": jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign())),
    "alq": jd.reducers.alq(3),
    "loco": jd.reducers.loco(jd.two_shot(jd.compressors.int4(block=8))),
}


@jax.jit
@functools.partial(jax.vmap, axis_name="data", in_axes=(None, 0))
def drift_of(anchor, data):
    """How far two steps take a worker."""
    x = anchor
    for _ in range(2):
        x = jax.tree.map(lambda p, g: p - 0.1 * g, x, jax.grad(loss)(x, data))
    return jax.tree.map(jnp.subtract, anchor, x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REDUCERS)
def test_any_reducer_carries_the_drift(name, mesh):
    """Five rounds on the mesh are five reductions of drifts done by hand: anchors and residuals."""
    reducer, tolerance = REDUCERS[name], 1e-4 if name == "f16" else 2e-6
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, reducer=reducer)
    step = jd.distribute(make(tx), mesh)
    state = start(tx, mesh)

    placed = jd.place({"reducer": reducer.init(params())}, WORKERS)
    reduce = jd.simulate(lambda state, drift: _reduced(reducer, state, jax.tree.map(lambda x: x[0], drift)), WORKERS)
    anchor = params()
    data = batch()
    parts = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), data)
    for _ in range(5):
        for _ in range(2):
            state, _ = step(state, data)
        placed, mean = reduce(placed, drift_of(anchor, parts))
        anchor = jax.tree.map(jnp.subtract, anchor, mean)
        assert_close(jd.local_sgd.global_params(state.opt), anchor, tolerance)
    assert_close(state.opt.reducer[0], placed["reducer"], tolerance)


def _reduced(reducer, state, drift):
    reduced, inner = reducer.reduce(drift, state["reducer"], jd.comm.over("data"))
    return {"reducer": inner}, reduced.mean


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "options",
    [
        {"buffers": "average", "warmup_steps": 2},
        {"fragments": 2, "delay": 1, "merge_alpha": 0.5, "reducer": REDUCERS["ef:qsgd"]},
    ],
)
def test_mesh_and_simulation_agree(options, mesh):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), jd.local_steps(optax.adamw(0.05), NESTEROV, sync_period=3, **options)
    )
    on_mesh, simulated = start(tx, mesh), start(tx, WORKERS)
    traces = []

    def traced(state, data):
        traces.append(None)
        return make(tx)(state, data)

    step, simulation = jd.distribute(traced, mesh), jd.simulate(make(tx), WORKERS)
    for seed in range(7):
        on_mesh, _ = step(on_mesh, batch(seed=seed))
        simulated, _ = simulation(simulated, batch(seed=seed))
    assert_close(on_mesh, simulated, 2e-5)
    assert len(traces) == 1
    sent = float(jd.transforms.stats(on_mesh.opt)["bytes"])
    assert sent == float(jd.transforms.stats(simulated.opt)["bytes"])
    if "warmup_steps" in options:  # two gradients, one model, one round of drifts and of Adam's moments and count
        assert sent == pytest.approx(SENT * 4 * (ENTRIES * (2 + 1 + 3) + 1), abs=4)


def test_simulation_keeps_the_condition():
    """The count is agreed, so it is not batched: steps between rounds skip the round's work under `vmap` too."""
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=8)
    program = jd.simulate(make(tx), WORKERS).lower(start(tx, WORKERS), batch()).compile()
    assert "conditional" in program.as_text()


def test_parameters_must_be_marked(mesh):
    tx = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=8)
    state = jd.place(TrainState(params(), tx.init(params())), mesh)
    with pytest.raises(ValueError, match=r"\['b'\] is the same on all workers .* PerWorker\(params, axis='data'\)"):
        jd.distribute(make(tx), mesh)(state, batch())


def test_wrappers_of_optax():
    """Inside: any wrapper, since workers step alone. Around: those that skip calls are refused."""
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=0.05)
    tx = jd.local_steps(optax.apply_if_finite(inner, 3), NESTEROV, sync_period=2)
    run = jd.simulate(make(tx), WORKERS)
    state, _ = run(start(tx, WORKERS), batch())
    state, _ = run(state, batch())
    assert int(jd.transforms.stats(state.opt)["rounds"]) == 1
    ones = optax.tree.map_params(tx, lambda x: jnp.ones_like(x), tx.init(params()))
    np.testing.assert_array_equal(ones.anchor["w"], np.ones((6, 4)))
    np.testing.assert_array_equal(ones.outer[0][0].trace["b"], np.ones(4))
    around = optax.MultiSteps(tx, 2)
    with pytest.raises(ValueError, match=r"optax\.MultiSteps around a transformation that communicates"):
        jd.simulate(make(around), WORKERS)(start(around, WORKERS), batch())


def test_step_keeps_updates_and_no_second_model(mesh):
    wide = {name: jnp.ones((256, 256)) for name in "abcd"}
    tx = jd.local_steps(optax.sgd(0.05, momentum=0.9), NESTEROV, sync_period=8)

    def loss_of(params, x):
        return jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), x))

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss_of)(state["params"], data)
        updates, opt = tx.update(gradient, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.place({"params": jd.PerWorker(wide), "opt": tx.init(wide)}, mesh)
    program = jd.distribute(step, mesh).lower(state, jnp.ones((8, 256))).compile()
    # The updates, the packed drift and its mean; not the model after the step, nor the momentum of before.
    assert program.memory_analysis().temp_size_in_bytes < 3.1 * 4 * 4 * 256**2
