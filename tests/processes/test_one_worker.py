"""One worker on a mesh of one device: every method is what it comes to without anybody to talk to."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizers_run import OPTIMIZERS
from problems import assert_close
from register import CASES
from register_run import PODS, State, gradients, params, train_step

import jaxdist as jd
from jaxdist._core.trees import fold_keys
from jaxdist.recipes import bagua
from jaxdist.reducers import Extras

STEPS = 4


def ran(tx, *, axis="data", apart=False):
    """The parameters after some steps; as one worker sees them."""
    mesh = jd.make_mesh({"data": 1} if axis == "data" else dict.fromkeys(PODS, 1))

    def make_state():
        return State(jd.PerWorker(params()) if apart else params(), tx.init(params()))

    state, run = jd.init_state(make_state, mesh, axis=axis), jd.distribute(train_step(tx, axis), mesh, axis=axis)
    for number in range(STEPS):
        state, _ = run(state, gradients(number, 1))
    return jax.tree.map(lambda x: x[0], state.params.value) if apart else state.params


def by_hand(tx):
    """The same without jaxdist around: plain optax on the gradients."""

    @jax.jit
    def step(state, batch):
        gradient = jax.tree.map(lambda g: g[0], batch)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt)

    state = State(params(), tx.init(params()))
    for number in range(STEPS):
        state = step(state, gradients(number, 1))
    return state.params


def adam():
    return optax.adam(0.1)


ONE = jd.topology.complete(1)
PLAIN = {
    "exact": lambda: optax.chain(jd.all_reduce(jd.exact()), adam()),
    "ddp": lambda: optax.chain(jd.recipes.ddp(), adam()),
    "skip_nonfinite": lambda: jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), adam())),
    "zero_redundancy 1": lambda: jd.zero_redundancy(adam()),
    "zero_redundancy 2": lambda: jd.zero_redundancy(adam(), stage=2),
    "gradient_allreduce": lambda: bagua.gradient_allreduce(adam()),
}
PLAIN_APART = {
    "local_sgd": lambda: jd.local_sgd.local_sgd(adam(), sync_period=2),
    "post_local_sgd": lambda: jd.local_sgd.post_local_sgd(adam(), switch_step=2, sync_period=1),
    "d_psgd": lambda: jd.gossip(adam(), ONE),
    "sgp": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.sgp()),
    "relay_sgd": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.relay_sgd()),
    "choco": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.choco(jd.top_k(0.25), step_size=0.3)),
    "d2": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.d2()),
    "gradient_tracking": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.gradient_tracking()),
    "async": lambda: bagua.async_model_average(adam(), sync_period=2),
    "decentralized": lambda: bagua.decentralized(adam(), 1),
}
# The model itself is what was sent, each step within half a step of an 8-bit code.
CODED = {
    "dcd_psgd": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.dcd_psgd(jd.qsgd(8))),
    "ecd_psgd": lambda: jd.gossip(adam(), ONE, method=jd.decentralized.ecd_psgd(jd.qsgd(8))),
    "low_precision": lambda: bagua.low_precision_decentralized(adam(), 1),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*PLAIN, *PLAIN_APART])
def test_it_is_the_optimizer_alone(name):
    found = ran({**PLAIN, **PLAIN_APART}[name](), apart=name in PLAIN_APART)
    assert_close(found, by_hand(adam()), 1e-5)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CODED)
def test_a_coded_model_is_the_optimizer_up_to_its_code(name):
    assert_close(ran(CODED[name](), apart=True), by_hand(adam()), STEPS * 0.4 / 255)


def rounds(inner, outer, period):
    """What `by_hand` is for a worker that steps `period` times and then takes an outer step along its own drift."""
    anchor = local = params()
    inner_state, outer_state = inner.init(local), outer.init(anchor)
    for number in range(STEPS):
        gradient = jax.tree.map(lambda g: jnp.asarray(g[0]), gradients(number, 1))
        updates, inner_state = inner.update(gradient, inner_state, local)
        local = optax.apply_updates(local, updates)
        if (number + 1) % period == 0:
            updates, outer_state = outer.update(jax.tree.map(jnp.subtract, anchor, local), outer_state, anchor)
            anchor = local = optax.apply_updates(anchor, updates)
    return local


def test_diloco_is_an_outer_step_along_the_own_drift():
    found = ran(jd.local_sgd.diloco(adam(), momentum=0.9, sync_period=2), apart=True)
    assert_close(found, rounds(adam(), optax.sgd(0.7, momentum=0.9, nesterov=True), 2), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_reducer_is_what_it_is_without_an_axis(name):
    case, alone = CASES[name], jd.comm.alone()
    axis, comm = ("data", alone) if case.levels == 1 else (tuple(PODS), jd.comm.nested(alone, alone))

    def reduce(updates, state, params=None):
        reduced, state = case.make().reduce(updates, state, comm, Extras(params=params))
        return reduced.mean, state

    def init(like):
        # On two levels the outer reducer draws different numbers on each chip.
        state = case.make().init(like)
        return state if case.levels == 1 else fold_keys(state, 0)

    local = optax.GradientTransformation(init, reduce)
    found = ran(optax.chain(jd.all_reduce(case.make(), axis=axis), optax.sgd(0.1)), axis=axis)
    assert_close(found, by_hand(optax.chain(local, optax.sgd(0.1))), max(case.tolerance, 1e-5))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_what_it_is_without_an_axis(name):
    one = OPTIMIZERS[name]
    found = ran(one.make(0.1), apart=one.drifts)
    assert_close(found, by_hand(one.make(0.1, axis=None)), 1e-5)
