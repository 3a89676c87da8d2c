"""Models with state of their own, random layers and nnx modules: each trains alike on a mesh and in simulation."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from problems import assert_close, batch
from register import CASES

import jaxdist as jd

TX = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))


class State(NamedTuple):
    params: Any
    opt: Any
    other: Any  # statistics, keys and counts


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(x))


def both_ways(step, build, mesh, steps=3):
    """Trains on the mesh and in simulation, checks that they agree and learn, and returns the state on the mesh."""
    run, simulated = jd.distribute(step, mesh), jd.simulate(step, 8)
    state, other = jd.init_state(build, mesh), jd.init_state(build, 8)
    losses = []
    for seed in range(steps):
        state, metrics = run(state, batch(32, seed=seed))
        other, _ = simulated(other, batch(32, seed=seed))
        losses.append(float(metrics["loss"]))
    assert_close(state, other, 1e-5)
    assert jd.runtime.disagreement(state, mesh) == ()
    assert len(set(losses)) == steps
    return state


def update(state, gradient, other):
    updates, opt = TX.update(gradient, state.opt, state.params)
    return State(optax.apply_updates(state.params, updates), opt, other)


def normed(statistics_of):
    """`statistics_of` is what becomes of a worker's own new running statistics."""

    def loss(params, data, statistics):
        out, new = Normed().apply({"params": params, **statistics}, data["x"], mutable=["batch_stats"])
        return jnp.mean((out - data["y"]) ** 2), new

    def step(state, data):
        value_and_grad = jd.local_value_and_grad(loss, has_aux=True)
        (value, new), gradient = value_and_grad(state.params, data, state.other)
        return update(state, gradient, statistics_of(new)), {"loss": lax.pmean(value, "data")}

    return step


def variables():
    found = Normed().init(jax.random.key(0), jnp.zeros((1, 6)))
    return found["params"], {"batch_stats": found["batch_stats"]}


def running_means(steps=3):
    """What each worker's running mean should be: `[W, 6]`."""
    mean = np.zeros((8, 6))
    for seed in range(steps):
        mean = 0.5 * mean + 0.5 * batch(32, seed=seed)["x"].reshape(8, 4, 6).mean(1)
    return mean


def test_batch_norm_with_agreed_statistics(mesh):
    def build():
        params, statistics = variables()
        return State(params, TX.init(params), statistics)

    state = both_ways(normed(lambda new: lax.pmean(new, "data")), build, mesh)
    found = state.other["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(found, running_means().mean(0), atol=1e-6)


def test_batch_norm_with_statistics_of_each_worker(mesh):
    def build():
        params, statistics = variables()
        return State(params, TX.init(params), jd.PerWorker(statistics))

    state = both_ways(normed(lambda new: new), build, mesh)
    found = state.other.value["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(found, running_means(), atol=1e-6)
    one_model = jd.consensus(state)
    np.testing.assert_allclose(
        one_model.other["batch_stats"]["BatchNorm_0"]["mean"], running_means().mean(0), atol=1e-6
    )


def test_dropout_draws_for_each_worker(mesh):
    """One agreed key and a count in the state; folded with the worker's number, every worker drops other units."""

    def loss(params, data, key):
        return jnp.mean((Dropped().apply(params, data["x"], rngs={"dropout": key}) - data["y"]) ** 2)

    def step(state, data):
        key, count = state.other
        mine = jax.random.fold_in(jax.random.fold_in(key, count), lax.axis_index("data"))
        value, gradient = jd.local_value_and_grad(loss)(state.params, data, mine)
        drawn = lax.all_gather(jax.random.uniform(mine), "data")
        metrics = {"loss": lax.pmean(value, "data"), "spread": lax.pmean(drawn.max() - drawn.min(), "data")}
        return update(state, gradient, (key, count + 1)), metrics

    def build():
        params = Dropped().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, 6)))
        return State(params, TX.init(params), (jax.random.key(2), jnp.zeros((), jnp.int32)))

    state = both_ways(step, build, mesh)
    assert int(state.other[1]) == 3
    _, metrics = jd.distribute(step, mesh)(state, batch(32))
    assert float(metrics["spread"]) > 0.1


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dense = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(x))


def test_a_module_with_its_own_random_keys_is_told_how_to_split_it():
    """`nnx.split` without a filter makes the keys and the counters of dropout parameters."""
    from flax import nnx

    _, params = nnx.split(nnx.Dropout(0.1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"'count'.* has dtype uint32: .*nnx\.split\(model, nnx\.Param, \.\.\.\)"):
        jd.simulate(lambda state, data: (state, TX.update(state, TX.init(state), state)[0]), workers=2)(
            params, jnp.zeros((2, 1))
        )


@pytest.mark.slow
def test_nnx_split_and_merge(mesh):
    """The module's structure is static, its variables are the state."""
    structure = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def loss(params, data, statistics):
        model = nnx.merge(structure, params, statistics, copy=True)  # variables of this trace, which may change
        value = jnp.mean((model(data["x"]) - data["y"]) ** 2)
        return value, nnx.state(model, nnx.BatchStat)

    def step(state, data):
        value_and_grad = jd.local_value_and_grad(loss, has_aux=True)
        (value, new), gradient = value_and_grad(state.params, data, state.other)
        return update(state, gradient, lax.pmean(new, "data")), {"loss": lax.pmean(value, "data")}

    def build():
        _, params, statistics = nnx.split(Model(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
        return State(params, TX.init(params), statistics)

    state = both_ways(step, build, mesh)
    np.testing.assert_allclose(state.other["norm"]["mean"][...], running_means().mean(0), atol=1e-6)
    assert nnx.merge(structure, state.params, state.other)(jnp.ones((2, 6))).shape == (2, 4)


REDUCERS = {
    "feedback": optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=1))), optax.sgd(0.1)),
    "two_shot": optax.chain(jd.all_reduce(jd.error_feedback(jd.two_shot(jd.qsgd(4)))), optax.sgd(0.1)),
}


def nnx_optimizer(tx):
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCERS)
def test_nnx_optimizer_as_a_part_of_the_state(mesh, name):
    """A module and an optimizer are pytrees: their marks stay, and the result is that of optax."""

    def step(state, data):
        model, optimizer = state
        structure, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, data):
            return jnp.mean((nnx.merge(structure, params, rest, copy=True)(data["x"]) - data["y"]) ** 2)

        value, gradient = jd.local_value_and_grad(loss)(params, data)
        optimizer.update(model, gradient)
        return (model, optimizer), {"loss": lax.pmean(value, "data")}

    state = both_ways(step, lambda: nnx_optimizer(REDUCERS[name]), mesh)
    residual = state[1].opt_state[0].reducer.residual
    assert isinstance(residual, jd.PerWorker)
    assert float(jnp.abs(residual.value["dense"]["kernel"][...]).max()) > 0


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.dense = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x, rngs):
        return self.dense(self.dropout(self.norm(x), rngs=rngs))


def noisy_optimizer(tx):
    model = Noisy(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), jax.random.key(1)


def noisy_step(state, data):
    """Running statistics are averaged, and every worker drops units of its own."""
    model, optimizer, key = state
    structure, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss(params, data, key):
        copy = nnx.merge(structure, params, statistics, copy=True)
        value = jnp.mean((copy(data["x"], nnx.Rngs(dropout=key)) - data["y"]) ** 2)
        return value, nnx.state(copy, nnx.BatchStat)

    value_and_grad = jd.local_value_and_grad(loss, has_aux=True)
    (value, new), gradient = value_and_grad(params, data, jd.runtime.worker_key(key))
    optimizer.update(model, gradient)
    nnx.update(model, lax.pmean(new, "data"))
    return (model, optimizer, jax.random.fold_in(key, 0)), {"loss": lax.pmean(value, "data")}


def marks_of(tree):
    """How often each kind of mark is in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (jd.PerWorker, jd.Sharded)))
    return {kind: sum(isinstance(x, kind) for x in leaves) for kind in (jd.PerWorker, jd.Sharded)}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].levels == 1])
@pytest.mark.filterwarnings("ignore::UserWarning")  # a biased code without feedback
def test_every_reducer_keeps_its_marks_in_an_nnx_optimizer(name):
    """Traced for eight workers; the states of a step go in and come out with one structure."""
    tx = optax.chain(jd.all_reduce(CASES[name].make()), optax.sgd(0.1))
    state = jax.eval_shape(lambda: jd.init_state(lambda: noisy_optimizer(tx), 8))
    after, metrics = jax.eval_shape(jd.simulate(noisy_step, 8), state, batch(32))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    params = nnx.state(noisy_optimizer(tx)[0], nnx.Param)
    assert marks_of(after[1]) == marks_of(jax.eval_shape(tx.init, params))
    assert metrics["loss"].shape == ()


OTHERS = {
    "demo": lambda: jd.optimizers.demo(1e-3),
    "one_bit_adam": lambda: jd.optimizers.one_bit_adam(1e-3, freeze_step=2),
    "skip_nonfinite": lambda: jd.transforms.skip_nonfinite(
        optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=1))), optax.sgd(0.1))
    ),
    "diloco": lambda: jd.local_sgd.diloco(optax.sgd(0.1), sync_period=4),
    "gossip": lambda: jd.gossip(optax.sgd(0.1), jd.topology.ring(8)),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_keep_their_marks_in_an_nnx_optimizer(name):
    """Workers that step locally have a model each, which is marked."""
    local = name in ("diloco", "gossip")

    def build():
        model, optimizer, key = noisy_optimizer(OTHERS[name]())
        return jd.PerWorker(model, resize="mean") if local else model, optimizer, key

    state = jax.eval_shape(lambda: jd.init_state(build, 8))
    after, _ = jax.eval_shape(jd.simulate(noisy_step, 8), state, batch(32))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    params = nnx.state(noisy_optimizer(OTHERS[name]())[0], nnx.Param)
    assert marks_of(after[1]) == marks_of(jax.eval_shape(OTHERS[name]().init, params))
    if local:
        unmarked = jax.eval_shape(lambda: jd.init_state(lambda: noisy_optimizer(OTHERS[name]()), 8))
        with pytest.raises(ValueError, match=r"leaf `0\.dense\.bias` differs between workers: mark it PerWorker"):
            jax.eval_shape(jd.simulate(noisy_step, 8), unmarked, batch(32))


@pytest.mark.slow
def test_batch_norm_and_dropout_with_an_nnx_optimizer(mesh):
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=1))), optax.sgd(0.01))
    model, optimizer, _ = both_ways(noisy_step, lambda: noisy_optimizer(tx), mesh)
    np.testing.assert_allclose(model.norm.mean[...], running_means().mean(0), atol=1e-6)
    assert marks_of(optimizer) == {jd.PerWorker: 1, jd.Sharded: 0}


@pytest.mark.parametrize("where", ["place", "init_state"])
def test_nnx_optimizers_that_lose_their_marks_are_refused(where):
    def put(build):
        return jd.place(build(), 8) if where == "place" else jd.init_state(build, 8)

    with pytest.raises(ValueError, match=r"nnx\.state and nnx\.split remove the marks.*\(model, optimizer\).*tx\.init"):
        put(lambda: nnx.state(nnx_optimizer(REDUCERS["feedback"])))
    with pytest.raises(ValueError, match=r"around single arrays.*nnx\.split\(model, nnx\.Param, \.\.\.\)"):
        put(lambda: nnx_optimizer(jd.zero_redundancy(optax.adam(0.1))))
    pairs = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: (x, x), params), lambda updates, state, params=None: (updates, state)
    )
    with pytest.raises(ValueError, match=r"one array for each parameter.*has 2 of them together.*tx\.init"):
        put(lambda: nnx_optimizer(pairs))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(6, 6, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(6, 6, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.kernel

    def __call__(self, x):
        return self.head(jnp.tanh(self.embed(x)))


class WithStream(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WithAttention(nnx.Module):
    def __init__(self, rngs, keep_rngs):
        self.layer = nnx.MultiHeadAttention(2, 6, rngs=rngs, decode=False, dropout_rate=0.5, keep_rngs=keep_rngs)

    def __call__(self, x, rngs):
        return self.layer(x, rngs=rngs)


def with_optimizer(make):
    model = make(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def test_a_shared_variable_is_named_wherever_a_state_begins():
    state = with_optimizer(Tied)
    run = jd.simulate(lambda state, data: (state, {}), 2)
    for begin in (
        lambda: jd.place(state, 2),
        lambda: jd.init_state(lambda: with_optimizer(Tied), 2),
        lambda: jd.resize(state, 2),
        lambda: run(state, jnp.zeros((2, 6))),
        lambda: jd.place({"best": jd.PerWorker(state[0])}, 2),
    ):
        with pytest.raises(
            ValueError, match=r"`.*embed\.kernel` and leaf `.*head\.kernel` of the state are one shared"
        ):
            begin()


def test_split_keeps_a_shared_variable_one(mesh):
    structure, params, rest = nnx.split(Tied(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, data):
        return jnp.mean((nnx.merge(structure, params, rest)(data["x"]) - data["x"]) ** 2)

    def step(state, data):
        value, gradient = jd.local_value_and_grad(loss)(state.params, data)
        return update(state, gradient, None), {"loss": lax.pmean(value, "data")}

    state = jd.init_state(lambda: State(params, TX.init(params), None), 2)
    state, _ = jd.simulate(step, 2)(state, batch(8))
    assert len(jax.tree.leaves(state.params)) == 1
    model = nnx.merge(structure, state.params, rest)
    assert model.embed.kernel is model.head.kernel


def test_a_stored_random_stream_is_named():
    for begin in (
        lambda: jd.init_state(lambda: with_optimizer(WithStream), 2),
        lambda: jd.place(WithStream(nnx.Rngs(0)), 2),
    ):
        with pytest.raises(
            ValueError, match=r"layers\.1\.rngs\.count` of the state .*nnx\.Dropout\(rate\).*worker_key"
        ):
            begin()
    # The streams of models of their own differ; their counts are still no parameters.
    own = jd.place({"model": jd.PerWorker(WithStream(nnx.Rngs(0)))}, 2)
    with pytest.raises(ValueError, match=r"argument .*rngs.*has dtype uint32 and so no gradient.*nnx\.Dropout\(rate\)"):
        jd.local_value_and_grad(lambda model, x: model(x).mean())(jax.tree.map(lambda x: x[0], own["model"].value), 1.0)


def test_the_model_of_a_pair_takes_the_global_parameters():
    tx = jd.local_sgd.diloco(optax.sgd(0.1), sync_period=1)

    def make():
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        return jd.PerWorker(model, resize="mean"), nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(state, data):
        model, optimizer = state
        _, gradient = jd.local_value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, data)
        optimizer.update(model, gradient)
        return (model, optimizer), {}

    state, _ = jd.simulate(step, 2)(jd.init_state(make, 2), jnp.ones((4, 6)))
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(1))
    nnx.update(model, jd.local_sgd.global_params(state[1].opt_state))
    # At the end of a round each worker's model is the global one.
    assert jnp.allclose(model.kernel[...], state[0].value.kernel[...][0], atol=1e-6)


LOCAL = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None)


class WithStatistics(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.layer = nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.norm(x))


def test_an_island_takes_the_parameters_of_a_module_and_names_the_split():
    model = WithStatistics(nnx.Rngs(0))
    pair = model, nnx.Optimizer(model, LOCAL, wrt=nnx.Param)
    with jd.islands.join(jd.islands.memory(), LOCAL, name="a") as island:
        with pytest.raises(
            ValueError, match=r"has an nnx module.*nnx\.split\(model, nnx\.Param, \.\.\.\)`.*\"rest\": rest"
        ):
            island.enter(pair)
        params = {"w": jnp.zeros((2, 3))}
        with pytest.raises(ValueError, match=r"no tree like the parameters that its init got, with leaves w \[2, 3\]:"):
            island.enter({"params": {"w": jnp.zeros(3)}, "opt": LOCAL.init(params)})
        structure, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params, rest, x):
            module = nnx.merge(structure, params, rest, copy=True)
            return (module(x) ** 2).mean(), nnx.state(module, nnx.Not(nnx.Param))

        @jax.jit
        def step(state, x):
            gradients, rest = jax.grad(loss_fn, has_aux=True)(state["params"], state["rest"], x)
            updates, opt = LOCAL.update(gradients, state["opt"], state["params"], sync=())
            return {"params": optax.apply_updates(state["params"], updates), "rest": rest, "opt": opt}

        state = island.enter({"params": params, "rest": rest, "opt": LOCAL.init(params)})
        for _ in range(2):
            state = step(state, jnp.arange(12.0).reshape(2, 6))
        state, report = island.meet(state)
    assert report.counted
    # Statistics are the island's own.
    assert state["rest"]["norm"]["mean"][...].any()
    assert_close(jd.local_sgd.global_params(state["opt"]), state["params"], 1e-6)


def test_attention_that_keeps_no_stream_trains_and_the_message_says_how():
    with pytest.raises(ValueError, match=r"layer\.rngs\.count` of the state .*MultiHeadAttention.*keep_rngs=False"):
        jd.place(WithAttention(nnx.Rngs(0), keep_rngs=True), 2)
    model = WithAttention(nnx.Rngs(0), keep_rngs=False)
    model.set_attributes(deterministic=False)

    def step(state, data):
        model, optimizer, key = state
        own = jd.runtime.worker_key(key)

        def loss(model, x):
            return (model(x, nnx.Rngs(dropout=own)) ** 2).mean()

        _, gradient = jd.local_value_and_grad(loss)(model, data)
        optimizer.update(model, gradient)
        return (model, optimizer, key), {}

    state = jd.init_state(lambda: (model, nnx.Optimizer(model, TX, wrt=nnx.Param), jax.random.key(0)), 2)
    trained, *_ = jd.simulate(step, 2)(state, jnp.ones((4, 3, 6)))[0]
    assert not jnp.array_equal(trained.layer.out.kernel[...], model.layer.out.kernel[...])


def test_statistics_that_the_loss_would_lose_are_named():
    def loss(model, data):
        return jnp.mean((model(data["x"]) - data["y"]) ** 2)

    for options in ({}, {"micro_batches": 2}, {"scale": 8.0}):
        with pytest.raises(ValueError, match=r"changes its argument \[0\]\.norm\.mean.*has_aux=True"):
            jd.local_value_and_grad(loss, **options)(Model(nnx.Rngs(0)), batch(8))
    value = jd.local_value_and_grad(lambda model, data: (loss(model, data), model.norm.mean[...]), has_aux=True)
    (_, mean), _ = value(Model(nnx.Rngs(0)), batch(8))
    assert float(jnp.abs(mean).max()) > 0


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(jnp.tanh(self.inner(x)), use_running_average=True)


# Each applies the module to rows `[n, 4]`; those marked write all Variables back, from results that are arguments.
LIFTED = {
    "remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),  # writes back
    "jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),  # writes back
    "remat of jit": lambda m, x: nnx.remat(nnx.jit(lambda m, x: m(x)))(m, x),  # writes back
    "vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "cond": lambda m, x: nnx.cond(x.sum() > -jnp.inf, lambda m, x: m(x), lambda m, x: x, m, x),
    "scan": lambda m, x: nnx.scan(
        lambda c, m: (m(c), None), in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=1
    )(x, m)[0],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", LIFTED)
def test_lifted_transforms_of_nnx_change_no_gradient(name, parts):
    def gradient(apply):
        def loss(model, x):
            return jnp.mean(apply(model, x) ** 2)

        value = jd.local_value_and_grad(loss, micro_batches=parts)
        run = jax.jit(jax.vmap(value, (None, 0), axis_name="data"))
        return run(Twice(nnx.Rngs(0)), jnp.arange(32.0).reshape(2, 4, 4) / 32)

    expected = jax.tree.leaves(gradient(lambda m, x: m(x)))
    assert any(np.abs(x).max() > 0 for x in expected[1:])
    for x, y in zip(expected, jax.tree.leaves(gradient(LIFTED[name])), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check", ["types", "values"])
def test_remat_of_nnx_trains_on_a_mesh(mesh, check):
    graph, params = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def step(state, x):
        apply = nnx.remat(lambda m, x: m(x))
        _, grads = jd.local_value_and_grad(lambda p, x: jnp.mean(apply(nnx.merge(graph, p), x) ** 2))(state.params, x)
        updates, opt = TX.update(grads, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt, ()), {}

    state = jd.place(State(params, TX.init(params), ()), mesh)
    before = jax.tree.map(np.asarray, state.params)
    state, _ = jd.distribute(step, mesh, check=check)(state, jnp.ones((8, 4)))
    assert not np.allclose(jax.tree.leaves(before)[1], jax.tree.leaves(state.params)[1])


@pytest.mark.parametrize("lift", [nnx.remat, nnx.jit])
def test_statistics_that_change_inside_a_lifted_transform_are_named(lift):
    def loss(model, data):
        return jnp.mean((lift(lambda m, x: m(x))(model, data["x"]) - data["y"]) ** 2)

    with pytest.raises(ValueError, match=r"changes its argument \[0\]\.norm\.mean.*has_aux=True"):
        jd.local_value_and_grad(loss)(Model(nnx.Rngs(0)), batch(8))


@pytest.mark.parametrize("name", ["remat", "scan"])
def test_lifted_transforms_of_linen_change_no_gradient(name):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            y = nn.tanh(nn.Dense(4)(x))
            return (y, None) if name == "scan" else y

    if name == "scan":
        lifted = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    else:
        lifted = nn.remat(Layer)()
    x = jnp.arange(16.0).reshape(4, 4) / 16
    params = lifted.init(jax.random.key(0), x)

    def apply(p, x):
        return lifted.apply(p, x)[0] if name == "scan" else lifted.apply(p, x)

    def by_hand(p, x):
        layers = [p["params"]["Dense_0"]]
        if name == "scan":
            layers = [jax.tree.map(lambda a, i=i: a[i], layers[0]) for i in range(2)]
        for layer in layers:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
        return x

    found, expected = (
        jd.local_value_and_grad(lambda p, x, f=f: jnp.mean(f(p, x) ** 2))(params, x) for f in (apply, by_hand)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Recurrent(nnx.Module):
    def __init__(self, rngs, stream=True):
        self.rnn = nnx.RNN(nnx.SimpleCell(3, 4, rngs=rngs), rngs=stream)

    def __call__(self, x):
        return self.rnn(x, rngs=nnx.Rngs(carry=0))


def test_recurrent_layers_are_told_how_to_keep_no_stream():
    """`nnx.RNN` has one by default, without `rngs=` of its user."""
    with pytest.raises(ValueError, match=r"rnn\.rngs\.count` of the state .*nnx\.RNN\(cell, rngs=False\)"):
        jd.place(Recurrent(nnx.Rngs(0)), 2)

    def step(state, data):
        model, optimizer = state
        _, gradient = jd.local_value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, data)
        optimizer.update(model, gradient)
        return (model, optimizer), {}

    model = Recurrent(nnx.Rngs(0), stream=False)
    state = jd.init_state(lambda: (model, nnx.Optimizer(model, TX, wrt=nnx.Param)), 2)
    trained, _ = jd.simulate(step, 2)(state, jnp.ones((4, 2, 3)))[0]
    assert not jnp.array_equal(trained.rnn.cell.dense_i.kernel[...], model.rnn.cell.dense_i.kernel[...])
