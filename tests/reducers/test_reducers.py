"""What is each reducer's own; `test_laws.py` has what all of them share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import feedback as reference
from register import CODES, SIZES, TOTAL
from register_run import STEPS, State, gradients, ran
from workers import trajectory

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.comm import over
from jaxdist.comm.base import add_bytes
from jaxdist.reducers import Extras
from jaxdist.schedule import assign_buckets

MIB = 1 << 20
REPELLING = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Matrix:
    """Parameters in a container that JAX only knows by registration."""

    w: jax.Array


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def top(part):
    return jd.compressed(jd.top_k(part))


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def descend(reducer, gradient, data, first, rate, steps):
    """`steps` of gradient descent, a row of `data` for each worker: points `[steps + 1, d]`, states, mean gradients."""

    def one_worker(row):
        def step(carry, _):
            x, state = carry
            g = gradient(x, row)
            reduced, state = reducer.reduce(g, state, over("data"))
            return (x - rate * reduced.mean, state), (x, state, jax.lax.pmean(g, "data"))

        (last, _), (xs, states, means) = jax.lax.scan(step, (first, reducer.init(first)), None, length=steps)
        return jnp.concatenate([xs, last[None]]), states, means

    xs, states, means = jax.jit(jax.vmap(one_worker, axis_name="data"))(data)
    return np.asarray(xs[0]), states, np.asarray(means[0])


def repelled(x, a):
    return 2 * (a @ x) * a + x / 2


# Error feedback


def test_feedback_follows_the_reference(float64):
    updates = rows(20, 4, 30)
    means, _, states = trajectory(jd.error_feedback(top(0.1)), updates)
    expected, residuals = reference.ef14(updates, 3)
    np.testing.assert_allclose(means, expected, atol=1e-12)
    np.testing.assert_allclose(states.residual.value, residuals, atol=1e-12)


def test_feedback_of_a_code_that_loses_nothing_is_the_exact_mean():
    updates = rows(3, 4, 30).astype(np.float32)
    means, _, states = trajectory(jd.error_feedback(jd.compressed(jc.identity())), updates)
    np.testing.assert_array_equal(means, trajectory(jd.exact(), updates)[0])
    assert (np.asarray(states.residual.value) == 0).all()


def test_the_virtual_iterate_follows_plain_descent(float64):
    data, rate = rows(4, 12), 0.05
    xs, states, means = descend(
        jd.error_feedback(top(0.1)), lambda x, a: x - a + 0.1 * jnp.sin(3 * x), data, jnp.ones(12), rate, 40
    )
    virtual = xs[1:] - rate * np.asarray(states.residual.value).mean(0)
    np.testing.assert_allclose(virtual, xs[0] - rate * np.cumsum(means, axis=0), atol=1e-12)


@pytest.mark.slow
def test_the_repelling_example_needs_feedback(float64):
    first, one = jnp.ones(3), top(1 / 3)
    xs, _, _ = descend(one, repelled, REPELLING, first, 0.1, 5)
    np.testing.assert_allclose(xs, (1 + 1.1 / 6) ** np.arange(6)[:, None] * np.ones(3), rtol=1e-12)
    for wrap in (jd.error_feedback, jd.reducers.ef21):
        xs, _, _ = descend(wrap(one), repelled, REPELLING, first, 0.01, 2000)
        assert np.abs(xs[-1]).max() < 1e-8


def test_unbiased_codes_are_shrunk_inside_feedback():
    """With ω = 9 the code enlarges what it is fed; divided by 1 + ω it is a contraction."""
    code = jd.compressors.random_k(0.1, unbiased=True)
    updates = np.broadcast_to(rows(1, 2, 40).astype(np.float32), (60, 2, 40))

    def residual(code):
        states = trajectory(jd.error_feedback(jd.compressed(code)), updates)[2]
        return np.linalg.norm(np.asarray(states.residual.value)[-1, 0])

    pretending = code._replace(variance=None, contraction=lambda shape: 1.0)
    assert residual(code) < 20 * np.linalg.norm(updates[0, 0])
    assert residual(pretending) > 1e6


def spread(x, target):
    return x - target


@pytest.mark.parametrize("name", ["two levels", pytest.param("around a two-shot", marks=pytest.mark.slow)])
def test_residuals_of_two_bits_stay_bounded(name):
    """Eight workers with gradients that differ for good, thousands of steps: the error is of their size, not of W."""
    code = jd.qsgd(2)
    reducer = jd.compressed(code) if name == "two levels" else jd.two_shot(code)
    targets = rows(8, 256).astype(np.float32)
    start = jnp.zeros(256)
    _, states, _ = descend(jd.error_feedback(reducer), spread, targets, start, 0.05, 3000)
    residual = np.linalg.norm(np.asarray(states.residual.value), axis=-1)
    size = np.linalg.norm(targets - targets.mean(0), axis=-1)[:, None]
    assert residual.shape == (8, 3000)
    assert (residual < 10 * size).all()
    # Nothing grows: the second half is as large as the first.
    assert residual[:, 1500:].mean() < 1.2 * residual[:, 100:1500].mean()


def test_feedback_refuses_what_it_cannot_correct():
    unknown = jc.top_k(0.1)._replace(contraction=None)
    vote = jd.reducers.Reducer(
        lambda like: (), lambda x, state, comm: (jd.reducers.Reduced(x, x), state), jd.reducers.Law.NONE
    )
    for wrap in (jd.error_feedback, jd.reducers.ef21):
        with pytest.raises(ValueError, match="neither its contraction δ nor its variance"):
            wrap(jd.compressed(unknown))
        with pytest.raises(ValueError, match="feedback needs to know"):
            wrap(vote)
        for inner in (jd.error_feedback(top(0.1)), jd.reducers.ef21(top(0.1))):
            with pytest.raises(ValueError, match="has error feedback already"):
                wrap(inner)


@pytest.mark.slow
def test_noisy_steps_are_divided_by_their_inflation():
    """`Σ_w |D(C(x_w))|² / Σ_w |x_w|²`, measured over all workers and leaves; the law stays exact."""
    grads = {"a": jnp.asarray(rows(4, 30)), "b": jnp.asarray(1e25 * rows(4, 5, 2, seed=1), jnp.float32)}
    plain, divided = (
        jax.jit(jax.vmap(lambda x, r=r: r.reduce(x, r.init(x), over("data"))[0], axis_name="data"))(grads)
        for r in (jd.compressed(jd.qsgd(2)), jd.compressed(jd.qsgd(2), divide_by_inflation=True))
    )
    before, after = (
        sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in jax.tree.leaves(x)) for x in (grads, plain.own)
    )
    assert after > 1.5 * before
    for name in grads:
        np.testing.assert_allclose(divided.mean[name], plain.mean[name] * (before / after), rtol=1e-5)
        np.testing.assert_allclose(divided.own[name], plain.own[name] * (before / after), rtol=1e-5)
    reducer = jd.compressed(jd.qsgd(2), divide_by_inflation=True)
    nothing = reducer.reduce(jnp.zeros(3), reducer.init(jnp.zeros(3)), jd.comm.alone())[0]
    assert nothing.mean.tolist() == [0.0] * 3


def test_inflation_is_of_unbiased_codes_without_feedback():
    for code in (jd.top_k(0.1), jd.compressors.random_k(0.1, unbiased=True)):
        with pytest.raises(ValueError, match="divide_by_inflation is for unbiased compressors"):
            jd.compressed(code, divide_by_inflation=True)
    with pytest.raises(ValueError, match="use one of the two"):
        jd.error_feedback(jd.compressed(jd.qsgd(2), divide_by_inflation=True))


def test_a_code_of_a_tree_is_the_codes_of_its_leaves():
    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4, bucket=64, code="entropy")))
    like = {"a": jnp.zeros((3, 50)), "b": jnp.zeros(7), "c": jnp.zeros((3, 50))}
    rng, codec = np.random.default_rng(0), reducer.forms.codec
    shapes = [(2, 76), (2, 3), (1, 4), (1, 1)]  # codes and norms of the leaves of one shape, then of the other
    arrays = [
        rng.integers(0, 4, s, dtype=np.uint8) if i % 2 == 0 else np.ones(s, np.float32) for i, s in enumerate(shapes)
    ]
    assert codec is not None
    arrays[0][:, -1] = 0  # codes of padding
    found = codec.decode(codec.encode(arrays, like), like)
    for x, y in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(jc.DamagedCodeError):
        codec.decode(codec.encode(arrays, like)[:-1], like)
    assert float(codec.expected_bits([jnp.asarray(x) for x in arrays], like)) > 32 * 7


def test_a_fading_residual_follows_the_reference(float64):
    updates = rows(20, 4, 30)
    means, _, states = trajectory(jd.error_feedback(top(0.1), decay=0.95), updates)
    expected, residuals = reference.decayed(updates, 3, 0.95)
    np.testing.assert_allclose(means, expected, atol=1e-12)
    np.testing.assert_allclose(states.residual.value, residuals, atol=1e-12)


def test_the_learning_rate_inside_follows_the_reference(float64):
    """Steps of the parameters, under a rate that falls tenfold, by way of `all_reduce`."""
    updates, rates = rows(20, 4, 30), np.geomspace(1, 0.01, 20)
    tx = jd.all_reduce(jd.error_feedback(top(0.1), with_learning_rate=True))

    def one_worker(updates):
        def step(state, batch):
            mean, state = tx.update(batch[0], state, learning_rate=batch[1])
            return state, (batch[1] * mean, state.reducer.residual.value)

        return jax.lax.scan(step, tx.init(updates[0]), (updates, jnp.asarray(rates)))[1]

    taken, residuals = jax.vmap(one_worker, in_axes=1, out_axes=1, axis_name="data")(jnp.asarray(updates))
    expected, owed = reference.with_rates(updates, 3, rates)
    np.testing.assert_allclose(taken[:, 0], expected, atol=1e-12)
    np.testing.assert_allclose(residuals, owed, atol=1e-12)


@pytest.mark.slow
def test_at_a_rate_of_zero_the_debt_stays():
    reducer = jd.error_feedback(top(0.5), with_learning_rate=True)
    x = jnp.array([1.0, 4.0])
    _, before = reducer.reduce(x, reducer.init(x), jd.comm.alone(), Extras(learning_rate=0.5))
    assert before.residual.value.tolist() == [0.5, 0.0]
    reduced, after = reducer.reduce(x, before, jd.comm.alone(), Extras(learning_rate=0.0))
    assert after.residual.value.tolist() == [0.5, 0.0]
    assert reduced.mean.tolist() == [0.0, 4.0]
    with pytest.raises(ValueError, match="pass learning_rate= to the update"):
        reducer.reduce(x, after, jd.comm.alone())


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_the_decay_is_checked(decay):
    with pytest.raises(ValueError, match=f"decay must be in \\(0, 1\\], got {decay}"):
        jd.error_feedback(top(0.1), decay=decay)


# EF21


@pytest.mark.parametrize("eta", [1.0, 0.1])
def test_ef21_follows_the_reference(float64, eta):
    updates = rows(20, 4, 30)
    means, owns, states = trajectory(jd.reducers.ef21(top(0.1), eta=eta), updates)
    expected, held = reference.ef21(updates, 3, eta)
    np.testing.assert_allclose(means, expected, atol=1e-12)
    np.testing.assert_allclose(owns, held, atol=1e-12)
    np.testing.assert_allclose(states.own.value, held, atol=1e-12)


def test_ef21_arrives_at_a_constant_gradient(float64):
    gradient = rows(1, 1, 50)
    means, _, _ = trajectory(jd.reducers.ef21(top(0.1)), np.broadcast_to(gradient, (10, 1, 50)))
    left = ((means - gradient[0]) ** 2).sum(1) / (gradient**2).sum()
    assert (left <= 0.9 ** np.arange(1, 11)).all()
    assert left[-1] == 0


def test_ef21_checks_its_arguments():
    for eta in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"eta must be in \\(0, 1\\], got {eta}"):
            jd.reducers.ef21(top(0.1), eta=eta)
    with pytest.raises(ValueError, match="would pile up in it"):
        jd.reducers.ef21(jd.exact()._replace(law=jd.reducers.Law.UNBIASED))


# By leaf


def program(mesh, reducer, shapes):
    """The compiled reduction for eight workers."""
    tx = jd.all_reduce(reducer)
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def step(state, batch):
        means, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state.opt)
        return State(means, opt), {}

    def make_state():
        return State(jax.tree.map(lambda x: jnp.zeros(x.shape), like), tx.init(like))

    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), like)
    return jd.distribute(step, mesh).lower(jax.eval_shape(lambda: jd.init_state(make_state, 8)), batch).compile()


def messages(compiled):
    return sorted((op.kind, op.dtype, op.bytes) for op in jd.analysis.collectives(compiled).ops)


@pytest.mark.slow
def test_parts_share_a_collective_and_frozen_leaves_cost_nothing(mesh):
    reducer = jd.reducers.per_leaf(
        lambda path, leaf: path, {"a": top(0.1), "b": jd.compressed(jd.qsgd(4)), "frozen": None}
    )
    found = messages(program(mesh, reducer, {"a": (50,), "b": (30,), "frozen": (1000,)}))
    assert found == [("all-gather", "uint8", CODES["top_k"].bytes(50) + CODES["qsgd 4"].bytes(30))]


def test_each_leaf_gets_the_reducer_of_its_label():
    updates = {"layers": [rows(1, 4, 10), rows(1, 4, 3, 10)], "head": rows(1, 4, 5)}
    policy = jd.reducers.per_leaf(
        lambda path, leaf: "frozen" if path == "layers/1" else "cut" if path.startswith("layers") else "whole",
        {"cut": top(0.1), "whole": jd.exact(), "frozen": None},
    )
    updates = jax.tree.map(lambda x: x.astype(np.float32), updates)
    means, owns, states = trajectory(policy, updates)
    assert sorted(states) == ["cut", "whole"]
    np.testing.assert_allclose(means["head"], updates["head"].mean(1), atol=1e-6)
    np.testing.assert_array_equal((owns["layers"][0] != 0).sum(2), 1)
    assert not means["layers"][1].any()
    assert means["layers"][1].shape == (1, 3, 10)


def test_an_unknown_label_names_the_leaf():
    reducer = jd.reducers.per_leaf(lambda path, leaf: "odd" if "1" in path else "even", {"even": jd.exact()})
    with pytest.raises(ValueError, match=r"leaf 'layers/1' has label 'odd', but reducers has only \['even'\]"):
        reducer.init({"layers": [jnp.zeros(2), jnp.zeros(2)]})


# Bucketed


def test_the_plan_of_buckets():
    sizes = [MIB // 2, 6 * MIB // 10, 30 * MIB, 10 * MIB, 20 * MIB]
    assert assign_buckets(sizes, bucket_bytes=25 * MIB, first_bucket_bytes=MIB) == [[3, 4], [2], [0, 1]]
    plan = assign_buckets([8] * 6, bucket_bytes=16, kinds=["x", "y", "x", "x", "y", "x"])
    assert sorted(map(tuple, plan)) == [(0, 2), (1, 4), (3, 5)]


def test_each_bucket_is_a_message_of_its_own(mesh):
    reducer = jd.reducers.bucketed(jd.exact(), bucket_bytes=400, first_bucket_bytes=None)
    compiled = program(mesh, reducer, {"a": (60,), "b": (60,), "c": (70,), "d": (10,)})
    found = jd.analysis.collectives(compiled)
    assert sum(op.messages for op in found.ops) == 3 - 1
    assert sum(op.bytes for op in found.ops) == 4 * 200


@pytest.mark.slow
def test_a_code_sees_the_whole_bucket_and_buckets_draw_apart():
    updates = {"a": np.full((1, 2, 40), 10.0, np.float32), "b": np.ones((1, 2, 40), np.float32)}
    means, _, _ = trajectory(jd.reducers.bucketed(top(0.5)), updates)
    assert (means["a"] == 10).all()
    assert not means["b"].any()
    equal = {name: np.linspace(0, 1, 40, dtype=np.float32) * np.ones((1, 2, 1), np.float32) for name in "ab"}
    means, _, _ = trajectory(
        jd.reducers.bucketed(jd.compressed(jd.qsgd(2)), bucket_bytes=160, first_bucket_bytes=None), equal
    )
    assert (means["a"] != means["b"]).any()


# Hierarchical


@pytest.mark.slow
def test_levels_use_their_own_links():
    fast, slow = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    sent = {fast: 0.0, slow: 0.0}
    for op in ran("hierarchical").collectives.ops:
        sent[op.replica_groups] += op.wire_bytes
        assert (op.dtype == "uint8") == (op.replica_groups == slow)
    part = -(-TOTAL // 4)
    assert sent == {fast: 2 * 3 * 4 * part, slow: CODES["qsgd 4"].bytes(part)}


def test_feedback_inside_telescopes():
    """Steps of rate 0.5 and the residuals of the shards, averaged over pods, make up the sum of the mean gradients."""
    state = ran("hierarchical").mesh[-1]
    delivered = np.concatenate([np.asarray(state.params[name]).ravel() for name in SIZES]) / -0.5
    residual = next(x for x in jax.tree.leaves(state.opt) if x.ndim == 2)
    expected = sum(np.concatenate([gradients(step)[name].mean(0).ravel() for name in SIZES]) for step in range(STEPS))
    np.testing.assert_allclose(delivered + np.asarray(residual).mean(0)[:TOTAL], expected, atol=1e-5)


def test_hierarchical_and_exact_give_the_mean():
    reducer = jd.hierarchical(inner=jd.exact(), outer=jd.exact())
    x = rows(2, 4, 3, 5).astype(np.float32)

    def reduce(x):
        return reducer.reduce({"w": x}, reducer.init({"w": x}), over(("pod", "chip")))[0].mean["w"]

    found = jax.vmap(jax.vmap(reduce, axis_name="chip"), axis_name="pod")(x)
    np.testing.assert_allclose(found, np.broadcast_to(x.mean((0, 1)), x.shape), atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(ran("exact").mesh[1].params["w"]), -0.5 * gradients(0)["w"].mean(0), atol=1e-6
    )


def test_groups_of_leaves_draw_for_themselves():
    code, x = jd.compressed(jd.qsgd(2)), {name: jnp.sin(jnp.arange(200.0)) for name in "ab"}
    reducer = jd.reducers.per_leaf(lambda path, leaf: path, dict.fromkeys("ab", code))
    mean = reducer.reduce(x, reducer.init(x), jd.comm.alone())[0].mean
    assert (mean["a"] != mean["b"]).any()


@pytest.mark.parametrize(
    "inner",
    [jd.two_shot(jd.qsgd(8)), jd.reducers.bucketed(jd.exact()), jd.reducers.partitioned(jd.exact())],
    ids=repr,
)
def test_a_group_without_leaves_in_a_dataclass(inner):
    """Such a tree has no leaves, and is no placeholder of `optax.tree.map_params`."""
    labels = {"matrix": jd.exact(), "vector": inner}
    policy = jd.reducers.per_leaf(lambda path, leaf: "matrix" if leaf.ndim > 1 else "vector", labels)
    tx = jd.all_reduce(policy, axis=None)
    params = Matrix(jnp.ones((2, 2)))
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates.w, params.w)
    # The placeholder is still recognized.
    optax.tree.map_params(tx, lambda x: x, tx.init(params))


def test_hierarchical_refuses_what_cannot_work():
    reducer = jd.hierarchical(inner=jd.exact(), outer=top(0.1))
    with pytest.raises(ValueError, match=r"inside, hierarchical\(inner=exact\(\), outer=error_feedback"):
        jd.error_feedback(reducer)
    with pytest.raises(ValueError, match="must be exact"):
        jd.hierarchical(inner=top(0.1), outer=jd.exact())
    with pytest.raises(ValueError, match="needs two levels of workers"):
        jax.eval_shape(lambda x: reducer.reduce(x, reducer.init(x), jd.comm.alone()), jnp.zeros(8))
    with pytest.raises(ValueError, match="needs two axes"):
        jd.all_reduce(reducer, axis="data").init(jnp.zeros(8))


# Tracked


@pytest.mark.slow
def test_counted_bytes_are_those_of_the_compiled_program():
    found = ran("tracked")
    stats = jd.transforms.stats(found.mesh[-1].opt)
    assert float(stats["bytes"]) == STEPS * found.collectives.wire_bytes
    assert int(stats["syncs"]) == STEPS
    assert 0 < float(stats["compression_error"]) < 1


@pytest.mark.slow
def test_bytes_of_both_branches_are_counted():
    """The plain mean before the start sends more than the low rank after it."""
    reducer = jd.error_feedback(jd.reducers.with_stats(jd.power_sgd(1, start_step=1)))
    _, _, states = trajectory(reducer, rows(2, 4, 12, 8).astype(np.float32))
    words = np.asarray(states.reducer.bytes)[:, 0].astype(np.float64)
    assert (words @ [2.0**32, 1]).tolist() == [1.5 * 4 * 96, 1.5 * 4 * (96 + 20)]


@pytest.mark.slow
def test_the_compression_error_is_that_of_this_step():
    updates = np.array([[[3.0, 4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]], np.float32)
    _, _, states = trajectory(jd.reducers.with_stats(top(0.25)), updates)
    np.testing.assert_allclose(np.asarray(states.error.value)[:, 0], [9 / 25, 0])


def test_more_bytes_than_32_bits_hold():
    words = jnp.array([0, 2**32 - 10], jnp.uint32)
    assert add_bytes(words, 30.0).tolist() == [1, 20]
    assert add_bytes(words, 3.0 * 2**32 + 30).tolist() == [4, 20]
    assert add_bytes(words, jnp.float32(16)).tolist() == [1, 6]
    assert add_bytes(words, jnp.float32(3.0 * 2**32 + 2**20)).tolist() == [4, 2**20 - 10]


def test_a_count_of_reductions_stops_at_the_largest_number():
    reducer = jd.reducers.with_stats(jd.exact())
    state = reducer.init(jnp.zeros(2))._replace(syncs=jnp.int32(2**31 - 1))
    _, after = reducer.reduce(jnp.ones(2), state, jd.comm.alone())
    assert int(after.syncs) == 2**31 - 1


@pytest.mark.slow
def test_a_count_of_empty_steps_stops_at_the_largest_number():
    for tx in (jd.all_reduce(jd.exact(), axis=None), jd.zero_redundancy(optax.sgd(0.1), axis=None)):
        state = tx.init(jnp.zeros(2))._replace(empty=jnp.int32(2**31 - 1))
        _, after = tx.update(jnp.ones(2), state, jnp.zeros(2), examples=0)
        assert int(after.empty) == 2**31 - 1


@pytest.mark.slow
def test_nothing_to_reduce():
    """A label without leaves, a masked tree: no buckets, nothing sent, the same state."""
    for reducer in (
        jd.reducers.bucketed(top(0.1)),
        jd.exact(),
        jd.compressed(jd.qsgd(4)),
        jd.error_feedback(jd.power_sgd(1)),
    ):
        state = reducer.init({"w": None})
        reduced, after = reducer.reduce({"w": None}, state, jd.comm.alone())
        assert reduced.mean == {"w": None}
        assert jax.tree.structure(after) == jax.tree.structure(state)
