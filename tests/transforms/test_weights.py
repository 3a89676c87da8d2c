"""`examples=` and `active=` mean the same in every method of the register: a gradient of weight 0 is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_register import LINES, WORKERS
from reference.weights import diloco_by_leaf, mean_by_leaf
from register_run import PODS, State, gradients, linear_loss, params

import jaxdist as jd
from jaxdist.transforms.weights import weight_of_leaves, weight_of_worker

STEPS = 3
# Of these four workers and three steps; each method meets a worker that begins, pauses and ends without examples.
COUNTS = np.array([[2, 0, 1, 3], [0, 1, 4, 0], [1, 1, 0, 0]], np.float32)


def method(name):
    line = LINES[name]
    return line, optax.with_extra_args_support(line.make())


def runner(name, keyword, engine):
    """`step(state, (gradients, counts))`, and a first state."""
    line, tx = method(name)
    extra = {key: value for key, value in line.extra.items() if key != "examples"}

    def step(state, batch):
        data, count = batch
        _, gradient = jd.local_value_and_grad(linear_loss, axis=line.axis)(state.params, data)
        given = {"examples": count[0]} if keyword == "examples" else {"active": count[0] > 0}
        updates, opt = tx.update(gradient, state.opt, state.params, **extra, **given)
        return State(optax.apply_updates(state.params, updates), opt), {}

    def make_state():
        return State(jd.PerWorker(params()) if line.drifts else params(), tx.init(params()))

    if engine == "simulate":
        workers = line.workers if line.axis == "data" else dict.fromkeys(PODS, 2)
        return jd.simulate(step, workers, axis=line.axis), jd.init_state(make_state, workers, axis=line.axis)
    mesh = jd.make_mesh({"data": WORKERS} if line.axis == "data" else dict.fromkeys(PODS, 2))
    run = jd.distribute(step, mesh, axis=line.axis, donate=False, check=engine)
    return run, jd.init_state(make_state, mesh, axis=line.axis)


def ran(run, state, left_out, steps=range(STEPS)):
    """The last state; gradients of weight 0 are replaced by `left_out`."""
    for step in steps:
        data = gradients(step, WORKERS)
        data = {
            name: np.where(COUNTS[step].reshape(-1, *[1] * (x.ndim - 1)) > 0, x, np.float32(left_out))
            for name, x in data.items()
        }
        state, _ = run(state, (data, COUNTS[step]))
    return state


def values(tree):
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def check_left_out(name, keyword, engine):
    run, start = runner(name, keyword, engine)
    try:
        jax.eval_shape(run, start, (gradients(0, WORKERS), COUNTS[0]))
    except ValueError as refusal:
        # Refused by name, before anything was sent.
        if f"{keyword}=" not in str(refusal):
            raise
        return False
    expected = values(ran(run, start, 0.0))
    found = values(ran(run, start, np.nan))
    assert all(np.isfinite(x).all() for x in found if x.dtype.kind == "f")
    for x, y in zip(expected, found, strict=True):
        np.testing.assert_array_equal(x, y)
    return True


# Majority votes and one-bit codes have no weights; all others leave workers out.
@pytest.mark.sampled(333)
@pytest.mark.parametrize("keyword", ["examples", "active"])
@pytest.mark.parametrize("name", LINES)
def test_a_gradient_of_weight_zero_is_left_out(name, keyword):
    check_left_out(name, keyword, "simulate")


@pytest.mark.sampled(350)
@pytest.mark.parametrize("keyword", ["examples", "active"])
@pytest.mark.parametrize("engine", ["types", "values"])
@pytest.mark.parametrize("name", LINES)
def test_a_gradient_of_weight_zero_is_left_out_on_a_mesh(name, engine, keyword):
    check_left_out(name, keyword, engine)


# Methods in which a worker takes steps of its own, and whose models nothing else moves within three steps.
OWN_STEPS = ["local_sgd", "diloco of examples", "noloco", "palsgd", "sparse_loco", "muloco", "d_psgd", "slowmo"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OWN_STEPS)
def test_an_inactive_worker_keeps_its_optimizer(name):
    line, tx = method(name)
    extra = {key: value for key, value in line.extra.items() if key != "examples"}

    def worker(gradient, active):
        state = tx.init(params())
        if name == "palsgd":  # whose first step is its warm-up, in which all workers take the same one
            _, state = tx.update(gradient, state, params(), active=jnp.array(True), **extra)
        return state, tx.update(gradient, state, params(), active=active, **extra)

    given = gradients(0, WORKERS)
    before, (_, after) = jax.jit(jax.vmap(worker, axis_name="data"))(given, jnp.array([True, False, True, True]))

    def inner(state):
        node = next(x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "inner")) if hasattr(x, "inner"))
        return values(node.inner)

    changed = [
        (np.asarray(x)[worker] != np.asarray(y)[worker]).any()
        for worker in (0, 1)
        for x, y in zip(inner(before), inner(after), strict=True)
        if x.size
    ]
    half = len(changed) // 2
    assert any(changed[:half])
    assert not any(changed[half:])


# ---- a tree of numbers


USED = np.array([[[1, 0, 2], [3, 0, 0]], [[0, 0, 1], [1, 0, 5]]], np.float32)  # [steps, W, leaves b, s, w]


@pytest.mark.parametrize("reducer", [jd.exact(), jd.compressed(jd.compressors.identity())])
def test_numbers_of_leaves_weigh_each_leaf_by_itself(reducer):
    data = gradients(0, 2)
    tx = jd.all_reduce(reducer)

    def worker(gradient, counts):
        return tx.update(gradient, tx.init(gradient), examples=dict(zip("bsw", counts, strict=True)))[0]

    poisoned = {n: np.where(USED[0, :, i].reshape(-1, *[1] * (x.ndim - 1)) > 0, x, np.nan) for i, (n, x) in pairs(data)}
    found = jax.jit(jax.vmap(worker, axis_name="data"))(poisoned, jnp.asarray(USED[0]))
    for i, (name, x) in pairs(data):
        expected = mean_by_leaf(x, USED[0, :, i])
        np.testing.assert_allclose(found[name][0], expected, rtol=1e-6)
        np.testing.assert_array_equal(found[name][0], found[name][1])


def pairs(tree):
    return enumerate(sorted(tree.items()))


def test_a_prefix_weighs_subtrees_and_an_unused_residual_waits():
    tx = jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.5))))
    first, second = ({"expert": {"w": jnp.array([[4.0, 1.0]] * 2)}, "body": jnp.array([[2.0, 1.0]] * 2)},) * 2

    def worker(first, second):
        _, state = tx.update(first, tx.init(first), examples={"expert": 1, "body": 1})
        mean, after = tx.update(second, state, examples={"expert": 0, "body": 1})
        return mean, state.reducer.residual.value, after.reducer.residual.value

    mean, before, after = jax.jit(jax.vmap(worker, axis_name="data"))(first, second)
    assert mean["expert"]["w"][0].tolist() == [0, 0]
    np.testing.assert_array_equal(before["expert"]["w"], after["expert"]["w"])
    assert mean["body"][0].tolist() != [0, 0]


BY_LEAF = {
    "ef21": lambda: jd.reducers.ef21(jd.compressed(jd.compressors.identity())),
    "feedback in groups": lambda: jd.reducers.per_leaf(
        lambda path, leaf: path, dict.fromkeys("ab", jd.error_feedback(jd.compressed(jd.compressors.identity())))
    ),
    "statistics": lambda: jd.reducers.with_stats(jd.exact()),
}


@pytest.mark.parametrize("name", BY_LEAF)
def test_leaf_by_leaf_states_wait_for_their_leaf(name):
    """Of EF21 also what is replicated, the mean of what the workers keep: else the next mean is off for good."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(3, 2, 4)).astype(np.float32) for name in "ab"}
    used = np.array([[[1, 2], [3, 1]], [[2, 0], [1, 0]], [[1, 1], [0, 3]]], np.float32)  # step, worker, leaf
    tx = jd.all_reduce(BY_LEAF[name]())

    def worker(drawn, used):
        def step(state, inputs):
            gradient, (a, b) = inputs
            updates, state = tx.update(gradient, state, examples={"a": a, "b": b})
            return state, updates

        return jax.lax.scan(step, tx.init({name: jnp.zeros(4) for name in "ab"}), (drawn, used))[1]

    found = jax.jit(jax.vmap(worker, in_axes=1, out_axes=1, axis_name="data"))(drawn, used)
    for i, leaf in enumerate("ab"):
        for number in range(3):
            expected = mean_by_leaf(drawn[leaf][number], used[number, :, i])
            np.testing.assert_allclose(found[leaf][number, 0], expected, atol=1e-6, err_msg=f"{leaf}, {number}")


@pytest.mark.parametrize("engine", ["simulate", pytest.param("types", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: jd.zero_redundancy(optax.adam(0.1)),
        lambda: optax.chain(jd.all_reduce(jd.exact(), delay=1), optax.adam(0.1)),
        lambda: jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), optax.adam(0.1))),
        lambda: optax.chain(jd.transforms.per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact())),
    ],
    ids=["zero_redundancy", "late", "skip_nonfinite", "per_worker"],
)
def test_leaves_that_nobody_used_do_not_move(make, engine):
    tx = make()

    def step(state, batch):
        data, counts = batch
        _, gradient = jd.local_value_and_grad(linear_loss)(state.params, data)
        examples = {"b": counts[0, 0], "s": counts[0, 1], "w": counts[0, 2]}
        updates, opt = tx.update(gradient, state.opt, state.params, examples=examples)
        return State(optax.apply_updates(state.params, updates), opt), {}

    def make_state():
        return State(params(), tx.init(params()))

    if engine == "simulate":
        run, state = jd.simulate(step, 2), jd.init_state(make_state, 2)
    else:
        mesh = jd.make_mesh({"data": 2})
        run, state = jd.distribute(step, mesh), jd.init_state(make_state, mesh)
    for number in range(2):
        data = gradients(number, 2)
        data["s"] = np.full_like(data["s"], np.nan)
        state, _ = run(state, (data, USED[number]))
    assert float(state.params["s"]) == 0
    assert all(np.isfinite(x).all() for x in values(state) if x.dtype.kind == "f")
    assert np.abs(state.params["b"]).max() > 0


@pytest.mark.parametrize("fragments", [None])
def test_diloco_averages_each_leaf_over_the_workers_that_used_it(fragments):
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(4, 2, 3)).astype(np.float32) for name in "ab"}
    used = rng.integers(0, 3, size=(4, 2, 2)).astype(np.float32)
    used[2:, :, 1] = 0  # in the second round nobody uses b
    tx = jd.local_steps(optax.sgd(0.2), optax.sgd(0.7, momentum=0.9, nesterov=True), sync_period=2, fragments=fragments)

    def worker(drawn, used):
        def step(state, inputs):
            x, opt = state
            target, counts = inputs
            gradient = {n: jnp.where(counts[i] > 0, x[n] - target[n], jnp.nan) for i, n in enumerate("ab")}
            updates, opt = tx.update(gradient, opt, x, examples={"a": counts[0], "b": counts[1]})
            x = optax.apply_updates(x, updates)
            return (x, opt), jd.local_sgd.global_params(opt)

        x = {name: jnp.zeros(3) for name in "ab"}
        return jax.lax.scan(step, (x, tx.init(x)), (drawn, used))[1]

    found = jax.jit(jax.vmap(worker, in_axes=1, out_axes=1, axis_name="data"))(drawn, jnp.asarray(used))
    for i, name in enumerate("ab"):
        expected = diloco_by_leaf(drawn[name], used[..., i], rate=0.2, period=2, outer_rate=0.7, momentum=0.9)
        np.testing.assert_allclose(found[name][:, 0], expected, atol=1e-6)
    assert np.array_equal(found["b"][3], found["b"][1])


# ---- mistakes


@pytest.mark.parametrize(
    ("examples", "error", "message"),
    [
        (-1, ValueError, "at least 0 and finite, got -1"),
        (float("nan"), ValueError, "finite"),
        (np.float32("inf"), ValueError, "finite"),
        (np.ones(4), ValueError, r"one number, that of this worker, got shape \(4,\)"),
        ("many", TypeError, "many"),
        (jnp.ones((), jnp.complex64), TypeError, "complex64"),
        ({"a": 1}, ValueError, "no prefix"),
        ({"a": 1, "b": None}, ValueError, "no number for some leaves|no prefix"),
        ([1, 2], ValueError, "no prefix"),
        ({"a": 1, "b": -2}, ValueError, "got -2"),
    ],
)
def test_mistakes_are_named(examples, error, message):
    with pytest.raises(error, match=message):
        weight_of_leaves(examples, None, {"a": jnp.zeros(2), "b": jnp.zeros(())})


def test_one_number_or_one_boolean():
    with pytest.raises(ValueError, match="demo takes one number as examples=, got a tree"):
        weight_of_worker({"a": 1}, None, name="demo")
    with pytest.raises(ValueError, match="active must be one boolean"):
        weight_of_worker(None, jnp.ones(2, bool), name="accumulate")
    with pytest.raises(ValueError, match=r"active must be one boolean.*got a tree.*as examples="):
        weight_of_leaves(None, {"a": True, "b": False}, {"a": jnp.zeros(2), "b": jnp.zeros(())})
    with pytest.raises(TypeError, match=r"active must be one boolean.*got 'yes'"):
        weight_of_worker(None, "yes", name="accumulate")
    assert weight_of_worker(None, None, name="accumulate") is None
    assert float(weight_of_worker(jnp.nan * jnp.ones(()), False, name="accumulate")) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: jd.all_reduce(jd.two_shot(jd.compressors.int8())),
        lambda: jd.all_reduce(jd.reducers.bucketed(jd.error_feedback(jd.compressed(jd.top_k(0.5))))),
        lambda: jd.zero_redundancy(optax.sgd(0.1), reducer=jd.error_feedback(jd.two_shot(jd.compressors.int8()))),
        lambda: jd.all_reduce(jd.reducers.median()),
    ],
    ids=["server", "bucketed", "zero_redundancy", "median"],
)
def test_reducers_that_cannot_weigh_single_leaves_refuse_a_tree(make):
    tx = make()

    def step(state, batch):
        _, gradient = jd.local_value_and_grad(linear_loss)(state.params, batch)
        examples = {"b": 1, "s": 1, "w": 0}
        updates, opt = tx.update(gradient, state.opt, state.params, examples=examples)
        return State(optax.apply_updates(state.params, updates), opt), {}

    run, state = jd.simulate(step, 2), jd.init_state(lambda: State(params(), tx.init(params())), 2)
    with pytest.raises(ValueError, match=r"single leaves|takes one number as examples="):
        jax.eval_shape(run, state, gradients(0, 2))


# ---- sums over calls


@pytest.mark.parametrize("engine", ["simulate", "types", "values"])
def test_accumulate_sums_the_numbers_of_each_leaf(engine):
    """Means over workers and calls, `Σ n g / Σ n` for each leaf by itself; NaN where `n = 0`."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(4, 2, 3)).astype(np.float32) for name in "ab"}
    used = rng.integers(0, 4, size=(4, 2, 2)).astype(np.float32)
    used[0, 0, 0], used[0, 1, 0], used[1, :, 1], used[0, :, 1] = 0, 2, 0, 0  # nobody uses b in the first cycle
    tx = jd.accumulate(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0)), 2)

    def step(state, batch):
        data, counts = batch
        w, opt = state
        gradient = {n: jnp.where(counts[0, i] > 0, data[n][0], jnp.nan) for i, n in enumerate("ab")}
        updates, opt = tx.update(gradient, opt, w, examples={"a": counts[0, 0], "b": counts[0, 1]})
        return (optax.apply_updates(w, updates), opt), {}

    where = 2 if engine == "simulate" else jd.make_mesh({"data": 2})
    run = jd.simulate(step, 2) if engine == "simulate" else jd.distribute(step, where, check=engine)
    w = {name: jnp.zeros(3) for name in "ab"}
    state = jd.place((w, tx.init(w)), where)
    expected = {name: np.zeros(3) for name in "ab"}
    for number in range(4):
        state, _ = run(state, ({n: x[number] for n, x in drawn.items()}, used[number]))
        if number % 2:
            for i, name in enumerate("ab"):
                calls = slice(number - 1, number + 1)
                values_of_cycle = drawn[name][calls].reshape(4, 3)
                expected[name] = expected[name] - mean_by_leaf(values_of_cycle, used[calls, :, i].ravel())
        if number == 1:
            assert not np.asarray(state[0]["b"]).any()
        for name in "ab":
            np.testing.assert_allclose(state[0][name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "specs", [{"b": jax.P(), "w": jax.P("model")}, {"b": jax.P("model"), "w": jax.P(None, "model")}]
)
def test_numbers_of_leaves_keep_the_residuals_of_shards(specs):
    """Of leaves that no worker used, also where the compiler shards them."""
    shapes, counts = {"b": (4,), "w": (3, 4) if len(specs["w"]) > 1 else (4, 3)}, np.array([[1, 0], [2, 0]], np.float32)
    rng = np.random.default_rng(0)
    data = [{name: rng.standard_normal((2, *s)).astype(np.float32) for name, s in shapes.items()} for _ in range(3)]
    reducer = jd.error_feedback(jd.compressed(jd.compressors.cast(jnp.float16)))

    def last_state(mesh, **options):
        tx = jd.all_reduce(reducer, **options)
        start = {name: jnp.zeros(s) for name, s in shapes.items()}

        def step(state, batch):
            gradient, numbers = jax.tree.map(lambda x: x[0], batch)
            updates, opt = tx.update(gradient, state.opt, examples={"b": numbers[0], "w": numbers[1]})
            return State(optax.apply_updates(state.params, updates), opt), {}

        state = jd.init_state(lambda: State(start, tx.init(start)), mesh)
        run = jd.distribute(step, mesh)
        for number, gradient in enumerate(data):
            state, _ = run(state, (gradient, np.ones_like(counts) if number != 1 else counts))
        return state.params

    expected = last_state(jd.make_mesh({"data": 2}, devices=jax.devices()[:2]))
    found = last_state(jd.make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4]), specs=specs)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ---- in float64


WEIGHTED = {
    "exact": (1, lambda: optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0))),
    "codes": (
        1,
        lambda: optax.chain(jd.all_reduce(jd.compressed(jd.compressors.identity())), optax.sgd(1.0)),
    ),
    "late": (2, lambda: optax.chain(jd.all_reduce(jd.exact(), delay=1), optax.sgd(1.0))),
    "zero_redundancy": (1, lambda: jd.zero_redundancy(optax.sgd(1.0))),
    "accumulate": (2, lambda: jd.accumulate(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0)), 2)),
    "anytime_minibatch": (1, lambda: jd.online.anytime_minibatch(jd.online.euclidean(), 1.0)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_do_not_round_float64_to_float32(name):
    """The mean of 1, 2 and 4 examples is no number of float32, and its inverse neither."""
    steps, make = WEIGHTED[name]
    gradient, counts = np.random.default_rng(0).standard_normal((3, 5)), np.array([1.0, 2.0, 4.0])
    with jax.enable_x64(True):
        tx, start = optax.with_extra_args_support(make()), jnp.zeros(5)

        def step(state, batch):
            updates, opt = tx.update(batch[0][0], state.opt, state.params, examples=batch[1][0])
            return State(optax.apply_updates(state.params, updates), opt), {}

        state = jd.init_state(lambda: State(start, tx.init(start)), 3)
        run = jd.simulate(step, 3)
        for _ in range(steps):
            state, _ = run(state, (gradient, counts))
    np.testing.assert_allclose(-state.params, counts @ gradient / 7, rtol=1e-14)
