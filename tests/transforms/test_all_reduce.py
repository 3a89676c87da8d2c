"""The line of a chain that talks: the gradient trap, unequal batches, what it refuses, what it compiles to."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.flatten_util import ravel_pytree
from problems import TrainState, assert_close, batch, fresh, loss, make_step, params

import jaxdist as jd
from jaxdist import analysis


def gradients_of_all(update, grads, *rest, workers=4):
    """`update(gradient, ...)` of every worker in simulation; the result of worker 0, checked to be that of all."""
    out = jax.jit(jax.vmap(update, axis_name="data", axis_size=workers))(grads, *rest)
    for leaf in jax.tree.leaves(out):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return jax.tree.map(lambda x: np.asarray(x[0]), out)


# ---- the gradient trap


def test_summed_gradients_are_refused(mesh):
    tx = jd.all_reduce(jd.exact())
    step = jd.distribute(make_step(tx, grad=jax.value_and_grad(loss)), mesh)
    with pytest.raises(ValueError, match=r"\['b'\] is the same on all workers .* local_value_and_grad\(loss, axis="):
        step(fresh(tx, mesh), batch())


def test_half_summed_gradients_are_refused(mesh):
    """One leaf cast to varying and one not: the second has been summed already."""
    tx = jd.all_reduce(jd.exact())

    def half(params, data):
        return jax.value_and_grad(loss)({**params, "w": jd.comm.over("data").varying(params["w"])}, data)

    with pytest.raises(ValueError, match=r"\['b'\] is the same"):
        jd.distribute(make_step(tx, grad=half), mesh)(fresh(tx, mesh), batch())


def test_what_the_trap_costs(mesh):
    """`jax.grad` of replicated parameters is the sum over workers, and a mean of it changes nothing: W times."""

    def one(params, data):
        summed = lax.pmean(jax.grad(loss)(params, data), "data")
        local = lax.pmean(jd.local_value_and_grad(loss)(params, data)[1], "data")
        return summed, local

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    summed, local = step(params(), batch())
    assert_close(local, jax.grad(loss)(params(), batch()))
    assert_close(summed, jax.tree.map(lambda x: 8 * x, local))


# ---- one worker


def test_alone():
    tx = jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.5))), axis=None)
    state = tx.init(params())
    gradient = jax.jit(jax.grad(loss))(params(), batch())
    mean, state = jax.jit(tx.update)(gradient, state)
    residual = state.reducer.residual.value
    assert_close(jax.tree.map(jnp.add, mean, residual), gradient, 1e-6)
    assert int((mean["w"] != 0).sum()) == 12


# ---- unequal numbers of examples


def loss_of_first(params, data, count):
    """The mean over the first `count` examples; without any it is 0/0, and so is its gradient."""
    errors = (jnp.tanh(data["x"] @ params["w"] + params["b"][None]) - data["y"]) ** 2
    there = jnp.arange(len(errors)) < count
    return (errors * there[:, None]).sum() / count / 4


@pytest.mark.parametrize("reducer", [jd.exact(), jd.compressed(jd.compressors.identity())])
def test_examples_give_the_gradient_of_one_process(reducer):
    """Each worker's mean over its own examples, weighed, is the mean over all of them."""
    tx, data, start = jd.all_reduce(reducer), batch(), params()

    def one(part, count):
        gradient = jax.grad(loss_of_first)(start, part, count)
        return tx.update(gradient, tx.init(gradient), examples=count)[0]

    run = jax.jit(jax.vmap(one, axis_name="data"))
    wanted = jax.jit(jax.grad(loss))(start, data)
    for counts in ([4, 4, 4, 4], [5, 1, 7, 3], [0, 8, 0, 8], [0, 0, 0, 16]):
        first = np.cumsum([0, *counts])[:4, None]
        rows = np.minimum(first + np.arange(16), 15)  # padded with examples that do not count
        found = run(jax.tree.map(lambda x, r=rows: x[r], data), jnp.asarray(counts, jnp.float32))
        for worker in (0, 3):
            assert_close(jax.tree.map(lambda x, w=worker: x[w], found), wanted, 1e-6)


def test_join_as_pytorch_has_it():
    """Finished workers leave the divisor (`divide_by_initial_world_size=False`), or stay in it with zero gradients."""
    grads = jnp.array([[1.0], [2.0], [3.0], [99.0]])
    active = jnp.array([1, 1, 1, 0])
    tx = jd.all_reduce(jd.exact())
    left = gradients_of_all(lambda g, n: tx.update(g, tx.init(g), examples=n)[0], grads, active)
    stayed = gradients_of_all(lambda g, n: tx.update(g * n, tx.init(g))[0], grads, active)
    assert (left.tolist(), stayed.tolist()) == ([2.0], [1.5])


def test_numbers_of_examples_do_not_overflow_float16():
    """The largest is 65504: 256 tokens times a gradient of 300 are more."""
    grads = jnp.array([[300.0], [200.0]], jnp.float16)
    tx = jd.all_reduce(jd.exact())
    found = gradients_of_all(
        lambda g, n: tx.update(g, tx.init(g), examples=n)[0], grads, jnp.array([256, 768]), workers=2
    )
    assert (found.dtype, found.tolist()) == (jnp.float16, [225.0])


def test_the_norm_of_a_residual_inside_a_step_is_that_of_this_worker():
    """The parts of a worker have no leading dimension of workers; a scalar has none at all."""
    tx = jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.25))))
    grads = {"w": jnp.arange(8.0).reshape(2, 4), "b": jnp.ones(2)}

    def norm(g):
        _, state = tx.update(g, tx.init(g))
        return jd.transforms.stats(state)["residual_norm"]

    np.testing.assert_allclose(jax.jit(jax.vmap(norm, axis_name="data"))(grads), [5**0.5, 77**0.5], rtol=1e-6)


@pytest.mark.slow
def test_no_examples_at_all(mesh):
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.compressed(jd.top_k(0.25)))), optax.sgd(0.1))

    def step(state, data):
        value, gradient = jd.local_value_and_grad(loss)(state.params, data["batch"])
        updates, opt = tx.update(gradient, state.opt, state.params, examples=data["examples"][0])
        return TrainState(optax.apply_updates(state.params, updates), opt), lax.pmean(value, "data")

    run = jd.distribute(step, mesh, donate=False)
    some, _ = run(fresh(tx, mesh), {"batch": batch(), "examples": jnp.ones(8, jnp.int32)})
    none, _ = run(some, {"batch": batch(seed=1), "examples": jnp.zeros(8, jnp.int32)})
    assert jd.transforms.stats(some.opt)["empty"] == 0
    assert jd.transforms.stats(none.opt)["empty"] == 1
    assert_close(none.params, some.params, 0)
    assert_close(none.opt[0].reducer, some.opt[0].reducer, 0)
    again, _ = run(none, {"batch": batch(), "examples": jnp.ones(8, jnp.int32)})
    assert float(jnp.abs(again.params["w"] - none.params["w"]).max()) > 0


# ---- what it refuses


def test_leaves_without_a_mean():
    for tree, message in (
        ({"w": jnp.ones(3), "n": jnp.ones(3, jnp.int32)}, r"\['n'\] has dtype int32: only floating"),
        ({"w": jd.Sharded(jnp.ones(3))}, r"\['w'\] is Sharded.*zero_redundancy"),
    ):
        tx = jd.all_reduce(jd.exact(), axis=None)
        with pytest.raises(ValueError, match=message):
            tx.init(tree)
        with pytest.raises(ValueError, match=message):
            tx.update(tree, tx.init({"w": jnp.ones(3)}))


def test_integers_can_be_left_out(mesh):
    tree = {"w": jnp.ones(3), "n": jnp.ones(3, jnp.int32)}
    masked = optax.masked(jd.all_reduce(jd.exact()), {"w": True, "n": False})
    out = gradients_of_all(
        lambda g: masked.update(g, masked.init(tree))[0]["w"],
        {
            "w": jnp.arange(12.0).reshape(4, 3),
            "n": jnp.zeros((4, 3), jnp.int32),
        },
    )
    assert out.tolist() == [4.5, 5.5, 6.5]


def test_the_axis_must_be_bound():
    tx = jd.all_reduce(jd.exact())
    with pytest.raises(ValueError, match="axis 'data' is not bound here: run the step with distribute"):
        tx.update(params(), tx.init(params()))


@pytest.mark.parametrize(
    ("wrap", "advice"),
    [
        (lambda tx: optax.MultiSteps(tx, 2), "micro_batches"),
        (lambda tx: optax.chain(optax.MultiSteps(tx, 2), optax.sgd(0.1)), "micro_batches"),
        (lambda tx: optax.apply_if_finite(tx, 3), "skip_nonfinite"),
    ],
)
def test_wrappers_that_decide_for_themselves_come_after(mesh, wrap, advice):
    tx = wrap(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1)))
    state = fresh(tx, mesh)
    for run in (jd.distribute(make_step(tx), mesh), jd.simulate(make_step(tx), 8)):
        with pytest.raises(ValueError, match=advice):
            run(state, batch())


def test_wrappers_after_it_work(mesh):
    after = optax.apply_if_finite(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 3)
    tx = optax.chain(jd.all_reduce(jd.exact()), after)
    run, state = jd.distribute(make_step(tx), mesh, donate=False), fresh(tx, mesh)
    first, _ = run(state, batch())
    second, _ = run(first, batch())
    assert_close(first.params, state.params, 0)
    assert float(jnp.abs(second.params["w"] - first.params["w"]).max()) > 0.01


# ---- local transformations before it


def test_per_worker_momentum(mesh):
    """DGC's momentum: every worker's own, before compression; the state is marked and differs."""
    tx = optax.chain(jd.transforms.per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact()), optax.sgd(0.1))
    run, simulated = jd.distribute(make_step(tx), mesh), jd.simulate(make_step(tx), 8)
    state, other = fresh(tx, mesh), fresh(tx, mesh)
    plain = optax.sgd(0.1, momentum=0.9)
    reference, opt, gradient = params(), plain.init(params()), jax.jit(jax.grad(loss))
    for seed in range(3):
        state, _ = run(state, batch(seed=seed))
        other, _ = simulated(other, batch(seed=seed))
        updates, opt = plain.update(gradient(reference, batch(seed=seed)), opt)
        reference = optax.apply_updates(reference, updates)
    assert_close(state, other)
    assert_close(state.params, reference)
    momentum = state.opt[0].value.trace["w"]
    assert momentum.shape == (8, 6, 4)
    assert float(jnp.abs(momentum[0] - momentum[1]).max()) > 0.01


def test_per_worker_may_be_the_whole_field():
    """Each worker by itself: the mark of the whole field is off inside the step and back on after it."""
    tx = jd.transforms.per_worker(optax.sgd(0.5, momentum=0.5))

    def step(state, batch):
        updates, opt = tx.update(state["x"] - batch[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 2)
    run = jd.simulate(step, workers=2)
    for _ in range(2):
        state, _ = run(state, jnp.array([0.0, 4.0]))
    np.testing.assert_allclose(state["x"].value, [0, 4.0])  # 0 + 2, then + (0.5 * 2 + 1)
    np.testing.assert_allclose(jax.tree.leaves(state["opt"])[0], [0, -4.0])


# ---- what it compiles to


def by_hand(tx, reduce, mesh):
    """What one writes without the library; `reduce` averages the gradients. The state is that of the library's step."""

    def one(state, data):
        local = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), state.params)
        gradient = jax.grad(loss)(local, data)
        updates, opt = tx.update(reduce(gradient), state.opt[1], state.params)
        return TrainState(optax.apply_updates(state.params, updates), (state.opt[0], opt)), {}

    mapped = jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    return jax.jit(mapped, donate_argnums=0)


def fused_mean(gradient):
    """The vector is written into its place: XLA:CPU would fuse the sum that makes it into a plain concatenation."""
    bias, matrix = gradient["b"], gradient["w"].ravel()
    flat = lax.dynamic_update_slice(jnp.concatenate([jnp.zeros_like(bias), matrix]), bias, (0,))
    return ravel_pytree(gradient)[1](lax.pmean(flat, "data"))


class OneLeaf(NamedTuple):
    w: Any


@pytest.mark.parametrize("leaves", ["two", "one"])
def test_exact_costs_nothing(mesh, leaves, monkeypatch):
    """The library's program has the opcodes of the program written by hand, and its bits."""
    if leaves == "one":
        monkeypatch.setattr("test_all_reduce.loss", lambda p, d: jnp.mean((jnp.tanh(d["x"] @ p["w"]) - d["y"]) ** 2))
    adam = optax.adam(0.1)
    tx = optax.chain(jd.all_reduce(jd.exact()), adam)
    start = {"w": params()["w"]} if leaves == "one" else params()

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    def state():
        return jd.init_state(lambda: TrainState(start, tx.init(start)), mesh)

    reduce = fused_mean if leaves == "two" else (lambda g: lax.pmean(g, "data"))
    ours, theirs = (
        run.lower(state(), batch()).compile() for run in (jd.distribute(step, mesh), by_hand(adam, reduce, mesh))
    )
    assert analysis.opcodes(ours) == analysis.opcodes(theirs)
    data = jax.device_put(batch(), jax.NamedSharding(mesh, P("data")))
    assert_close(ours(state(), data)[0], theirs(state(), data)[0], 0)


def test_exact_sends_one_collective_for_each_dtype(mesh):
    tree = {"a": jnp.ones(3), "b": jnp.ones((4, 5)), "c": jnp.ones(7, jnp.float16), "d": jnp.ones((), jnp.float16)}
    tx = jd.all_reduce(jd.exact())

    def one(rows):
        gradient = jax.tree.map(lambda x: x[0], rows)
        return tx.update(gradient, tx.init(gradient))[0]

    rows = jax.tree.map(lambda x: jnp.tile(x[None], (8,) + (1,) * x.ndim), tree)
    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P()))
    found = analysis.collectives(step.lower(rows).compile())
    assert sorted((op.kind, op.dtype, op.bytes, op.messages) for op in found.ops) == [
        ("all-reduce", "float16", 16, 1),
        ("all-reduce", "float32", 92, 1),
    ]
    assert_close(step(rows), tree, 0)


def test_examples_ride_along_with_the_gradients(mesh):
    tx = jd.all_reduce(jd.exact())

    def one(rows, counts):
        return tx.update(rows[0], tx.init(rows[0]), examples=counts[0])[0]

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P()))
    found = analysis.collectives(step.lower(jnp.ones((8, 10)), jnp.ones(8)).compile())
    assert [(op.kind, op.bytes) for op in found.ops] == [("all-reduce", 44)]
