"""Optimizers of whole matrices on shards, each computed by its owner: values, products, bytes, numbers of workers."""

import re
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import analysis

STEPS = 3


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def params():
    """Of 5 matrices each of 4 workers owns one, and one is left over; 4 of another shape, a square, and a vector."""
    tall = {f"tall{i}": normal(i, 8, 5) for i in range(5)}
    wide = {f"wide{i}": normal(20 + i, 6, 7) for i in range(4)}
    return tall | wide | {"square": normal(30, 4, 4), "bias": normal(31, 5), "scale": jnp.ones(())}


def equal_matrices(count, size=32):
    return {f"w{i}": normal(i, size, size) for i in range(count)}


def gradient(params, batch):
    return jax.tree.map(lambda p: jnp.sin(3 * p) + p - batch.mean().astype(p.dtype), params)


def batches():
    return np.random.default_rng(0).normal(size=(STEPS, 24)).astype(np.float32)


@cache
def plain(name):
    return run_alone(OPTIMIZERS[name], params())


def run_alone(tx, found, *, steps=STEPS):
    """The optimizer without jaxdist, on the mean gradient."""
    tx = optax.chain(tx)
    state = jax.jit(tx.init)(found)

    @jax.jit
    def step(found, state, batch):
        updates, state = tx.update(gradient(found, batch), state, found)
        return optax.apply_updates(found, updates), state

    for batch in batches()[:steps]:
        found, state = step(found, state, batch)
    return found


def make(tx, *, means=False):
    """A step; `means` for gradients that are averaged already, as those of sharded parameters are."""

    def step(state, batch):
        batch = jax.lax.pmean(batch.mean(), "data") if means else batch
        updates, opt = tx.update(gradient(state.params, batch), state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def run(tx, place, start=None, *, steps=STEPS, means=False, state=None):
    if state is None:
        start = params() if start is None else start
        state = jd.place(TrainState(start, tx.init(start)), place)
    step = make(tx, means=means)
    step = jd.simulate(step, place) if isinstance(place, int) else jd.distribute(step, place)
    for batch in batches()[:steps]:
        state, _ = step(state, batch)
    return state


def mesh_of(workers):
    return jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])


class Factors(NamedTuple):
    left: Any
    moments: Any


def shampoo(rate, *, leaf_by_leaf=False):
    """Two steps of SOAP and Shampoo for matrices: a basis of `G Gᵀ`, in which the second moments are kept.

    Its state has a square matrix for each parameter, and it combines several arrays of the parameter's shape. With
    `leaf_by_leaf` it computes all of a leaf before the next, as a loop over leaves does.
    """

    def init_fn(params):
        square = jax.tree.map(lambda p: jnp.zeros((p.shape[0], p.shape[0])) if p.ndim == 2 else jnp.zeros(()), params)
        return Factors(square, jax.tree.map(jnp.zeros_like, params))

    def add(left, g):
        return 0.9 * left + g @ g.T if g.ndim == 2 else left

    def turn(left, g):
        return jnp.linalg.qr(left + jnp.eye(left.shape[0]))[0].T @ g if g.ndim == 2 else g

    def turn_back(left, x):
        return jnp.linalg.qr(left + jnp.eye(left.shape[0]))[0] @ x if x.ndim == 2 else x

    def update_tree(g, state, params):
        left = jax.tree.map(add, state.left, g)
        turned = jax.tree.map(turn, left, g)
        moments = jax.tree.map(lambda m, x: 0.9 * m + x**2, state.moments, turned)
        scaled = jax.tree.map(lambda x, m: x / (jnp.sqrt(m) + 1e-3), turned, moments)
        updates = jax.tree.map(lambda l, x, p: -rate * turn_back(l, x) - 0.01 * p, left, scaled, params)
        return updates, Factors(left, moments)

    def update_fn(updates, state, params=None):
        if not leaf_by_leaf:
            return update_tree(updates, state, params)
        leaves, tree = jax.tree.flatten(updates)
        others = [tree.flatten_up_to(x) for x in (*state, params)]
        found = [update_tree(g, Factors(*both), p) for g, *both, p in zip(leaves, *others, strict=True)]
        new = [tree.unflatten(x) for x in zip(*(state for _, state in found), strict=True)]
        return tree.unflatten([u for u, _ in found]), Factors(*new)

    return optax.GradientTransformation(init_fn, update_fn)


def by_callback(rate):
    """Products that Python computes: a callback cannot be called for several arrays at once."""

    def whiten(g):
        like = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return jax.pure_callback(lambda x: np.asarray(x @ (x.T @ x)) * 0.1, like, g) if g.ndim == 2 else g

    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: -rate * whiten(g), updates))


OPTIMIZERS = {
    "muon": optax.contrib.muon(1e-2, weight_decay=0.1),
    "adaptive": optax.contrib.muon(1e-2, adaptive=True, consistent_rms=0.2),
    "polar": optax.contrib.muon(optax.linear_schedule(1e-2, 0.0, 9), ns_coeffs="dion", preconditioning="schatten"),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-2)),
    "clip after": optax.chain(optax.contrib.muon(1.0), optax.clip_by_global_norm(0.1)),
    "inject": optax.inject_hyperparams(optax.contrib.muon)(learning_rate=1e-2),
    "if finite": optax.apply_if_finite(optax.contrib.muon(1e-2), 3),
    "soap": shampoo(1e-2),
    "soap, leaf by leaf": shampoo(1e-2, leaf_by_leaf=True),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "callback": by_callback(1e-2),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("workers", [4, 2, 3, 8, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_optimizer(name, workers):
    """In simulation, where gradients are of replicated parameters."""
    assert_close(run(jd.zero_redundancy(OPTIMIZERS[name]), workers).params, plain(name), 1e-5)


@pytest.mark.parametrize("name", ["muon", pytest.param("soap", marks=pytest.mark.slow)])
def test_on_a_mesh(name):
    tx = jd.zero_redundancy(OPTIMIZERS[name], stage=2)
    assert_close(run(tx, mesh_of(4)).params, plain(name), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["types", "values"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_on_a_mesh(name, check):
    tx = jd.zero_redundancy(OPTIMIZERS[name])
    state = jd.place(TrainState(params(), tx.init(params())), mesh_of(4))
    step = jd.distribute(make(tx), mesh_of(4), check=check)
    for batch in batches():
        state, _ = step(state, batch)
    assert_close(state.params, plain(name), 1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["muon", "clip after", "soap"])
def test_sharded_parameters(name):
    """Stage 3: what an owner computes returns in shards, and some parameters stay replicated."""
    start = jd.zero.shard(params(), smallest=41)
    found = run(jd.zero_redundancy(OPTIMIZERS[name], reducer=None), 4, start, means=True).params
    assert_close(jd.consensus(found), plain(name), 1e-5)


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "options",
    [
        {"master_dtype": jnp.float32},
        {"state_compressor": jd.compressors.cast(jnp.bfloat16, rounding="stochastic")},
        {"compressor": jd.compressors.int8(block=8)},
        {"compressor": jd.compressors.int8(block=8), "master_dtype": jnp.float32},
    ],
    ids=str,
)
def test_with_masters_and_codes(options):
    """Updates that are rounded or encoded are sent in shards, by the workers that own these."""
    found = run(jd.zero_redundancy(OPTIMIZERS["muon"], **options), 4).params
    assert_close(found, plain("muon"), 1e-5 if options == {"master_dtype": jnp.float32} else 0.02)


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_owners_within_pods(cut):
    """Chips own matrices of their pod, and pods differ between synchronizations: a mesh does what simulation does."""
    places: Any = {"pod": 2, "chip": 2}, jd.make_mesh({"pod": 2, "chip": 2}, devices=jax.devices()[:4])
    inner = jd.zero_redundancy(optax.contrib.muon(1e-2, weight_decay=0.1), reducer=None, axis="chip")
    tx = jd.local_steps(inner, optax.sgd(0.7), sync_period=2, axis="pod")
    start, axes = equal_matrices(3, 6), ("pod", "chip")

    def step(state, batch):
        mean = jax.lax.pmean(batch.mean(), "chip")
        updates, opt = tx.update(gradient(state.params, mean), state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    def make_state():
        given = jd.zero.shard(start, smallest=0, axis="chip") if cut else start
        return TrainState(jd.PerWorker(given, axis="pod"), tx.init(given))

    simulated, state = (jd.init_state(make_state, place, axis=axes) for place in places)
    simulate, run = jd.simulate(step, places[0], axis=axes), jd.distribute(step, places[1], axis=axes)
    for batch in batches():
        simulated, _ = simulate(simulated, batch)
        state, _ = run(state, batch)
    assert_close(state, simulated, 1e-5)


def test_a_step_without_examples_changes_nothing():
    tx = jd.zero_redundancy(OPTIMIZERS["muon"])

    def step(state, batch):
        updates, opt = tx.update(gradient(state.params, batch), state.opt, state.params, examples=batch[0])
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(params(), tx.init(params())), 4)
    idle, _ = jd.simulate(step, 4)(state, jnp.zeros(4))
    assert_close(idle.params, state.params, 0)
    assert_close(idle.opt.inner, state.opt.inner, 0)


@pytest.mark.slow
def test_fewer_and_more_workers_go_on():
    """The state is cut as that of any optimizer: owners keep nothing, so that resizing knows nothing of them."""
    start, tx = equal_matrices(5, 6), jd.zero_redundancy(optax.contrib.muon(1e-2))
    state = jd.place(TrainState(start, tx.init(start)), 4)
    for batch, workers in zip(batches(), (4, 2, 8), strict=True):
        state = jd.resize(state, workers)
        shapes = [x.shape for x in jax.tree.leaves(state)]
        state, _ = jd.simulate(make(tx), workers)(state, batch)
        assert shapes == [x.shape for x in jax.tree.leaves(state)]
    assert_close(state.params, run_alone(optax.contrib.muon(1e-2), start), 1e-5)


def test_a_checkpoint_goes_on_with_another_number_of_workers(tmp_path):
    start, tx = equal_matrices(5, 6), jd.zero_redundancy(optax.contrib.muon(1e-2))
    state = jd.place(TrainState(start, tx.init(start)), mesh_of(4))
    state, _ = jd.distribute(make(tx), mesh_of(4))(state, batches()[0])
    jd.checkpoint.save(tmp_path, state, step=1)
    state = jd.checkpoint.restore(tmp_path, jd.place(TrainState(start, tx.init(start)), mesh_of(2)))
    step = jd.distribute(make(tx), mesh_of(2))
    for batch in batches()[1:]:
        state, _ = step(state, batch)
    assert_close(state.params, run_alone(optax.contrib.muon(1e-2), start), 1e-5)


def compile_step(tx, start, workers=4, *, means=False):
    mesh = mesh_of(workers)
    state = jd.place(TrainState(start, tx.init(start)), mesh)
    step = jd.distribute(make(tx, means=means), mesh, donate=False)
    return step.lower(state, np.zeros(24, np.float32)).compile()


def count_products(program):
    """The products of matrices that one worker computes, from the compiled program: batched ones are as many."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", program.as_text())
    return sum(prod(map(int, shape.split(",")[:-2])) for shape in shapes)


def wire_bytes(program):
    return analysis.collectives(program).wire_bytes


# Three products in each of five iterations.
MUON = 15


@pytest.mark.parametrize(
    ("workers", "count", "each", "sent"),
    [
        # Two for each of four workers. From each shard what others own is sent: a quarter of all that is sent once.
        (4, 8, 2, 2 * 8 + 8 / 4),
        # The ninth is left over, and is gathered for all.
        pytest.param(4, 9, 3, 2 * 9 + 8 / 4, marks=pytest.mark.slow),
        # Three are too few: as if there were no owners.
        (4, 3, 3, 2 * 3),
        # Five for eight workers: one each, and rows for eight, there and back.
        (8, 5, 1, 2 * 5 + 2),
    ],
)
def test_products_and_bytes(workers, count, each, sent):
    """A reduce-scatter and a gather, as with any optimizer, and what goes to owners; a sum for each norm."""
    start, tx = equal_matrices(count), jd.zero_redundancy(optax.contrib.muon(1e-2))
    program = compile_step(tx, start, workers)
    assert count_products(program) == MUON * each
    norms = 2 * 4 * count
    assert wire_bytes(program) == (workers - 1) / workers * (4 * 32 * 32 * sent + norms)


def test_products_and_bytes_in_stage_3():
    """A quarter goes to owners and a quarter returns, in place of a gather of all."""
    start = jd.zero.shard(equal_matrices(8), smallest=0)
    program = compile_step(jd.zero_redundancy(optax.contrib.muon(1e-2), reducer=None), start, means=True)
    assert count_products(program) == MUON * 2
    sent = 3 / 4 * 4 * 32 * 32 * 8 * 2 / 4
    norms_and_batch = 2 * 3 / 4 * 4 * (8 + 1)
    assert wire_bytes(program) == sent + norms_and_batch


def test_a_condition_on_the_count_remains_one():
    """Products in every second step: not both branches, of which one is chosen."""

    def update_fn(updates, state, params=None):
        def multiply(g):
            # A loop is evaluated as a whole, with its condition inside.
            return jax.lax.fori_loop(
                0, 2, lambda i, x: jax.lax.cond((state + i) % 2 == 0, lambda x: x @ x, lambda x: x, x), g
            )

        return jax.tree.map(lambda g: -0.01 * multiply(g), updates), state + 1

    inner = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update_fn)
    start = equal_matrices(8, 6)
    assert_close(run(jd.zero_redundancy(inner), 4, start).params, run_alone(inner, start), 1e-4)
    text = compile_step(jd.zero_redundancy(inner), start).as_text()
    assert "conditional(" in text


def test_masters_are_not_sent():
    """With bfloat16 parameters a float32 momentum was gathered, and then the parameters."""
    start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), equal_matrices(8))
    program = compile_step(jd.zero_redundancy(optax.contrib.muon(1e-2), master_dtype=jnp.float32), start)
    assert count_products(program) == MUON * 2
    # Gradients and parameters in two bytes, and what goes to owners and back in four.
    norms = 2 * 3 / 4 * 4 * 8
    assert wire_bytes(program) == 3 / 4 * 32 * 32 * 8 * (2 + 2 + 2 * 4 / 4) + norms


def test_what_combines_matrices():
    """Products of several leaves: of a sum of all, which is one of shards, and of each leaf with the one before."""

    def of_sum(updates, params):
        total = sum(jax.tree.leaves(updates))
        return jax.tree.map(lambda g: -0.1 * (total @ g), updates)

    def chained(updates, params):
        leaves, tree = jax.tree.flatten(updates)
        return tree.unflatten([-0.1 * (leaves[i - 1] @ (leaf @ leaf)) for i, leaf in enumerate(leaves)])

    start = equal_matrices(8, 8)
    for f in (of_sum, chained):
        tx = optax.stateless(f)
        assert_close(run(jd.zero_redundancy(tx), 4, start, steps=2).params, run_alone(tx, start, steps=2), 1e-4)
    # The sum goes to all owners with each of the eight.
    assert count_products(compile_step(jd.zero_redundancy(optax.stateless(of_sum)), start)) == 2


@pytest.mark.slow
def test_with_state_on_the_host():
    tx = jd.offload.host(jd.zero_redundancy(OPTIMIZERS["muon"]))
    assert_close(run(tx, mesh_of(4)).params, plain("muon"), 1e-5)
