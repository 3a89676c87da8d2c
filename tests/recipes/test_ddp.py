"""PyTorch's DDP: buckets, unused leaves, the dtype on the wire, accumulation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from problems import TrainState, assert_close, batch, fresh, loss, make_step, params

import jaxdist as jd
from jaxdist.zero.shards import buckets_of


def with_head():
    return {**params(), "head": {"kernel": jnp.ones((40, 50)), "bias": jnp.ones(50)}}


MASK = {"b": False, "w": False, "head": {"kernel": True, "bias": True}}
SIZE = 4 * (4 + 24)


# ---- unused leaves


def scanned(p, x):
    def body(carry, layer):
        return jnp.tanh(carry @ layer["w"]), None

    return jnp.sum(lax.scan(body, x, {"w": p["layers"], "idle": p["idle"]})[0])


def branched(p, x):
    return jnp.sum(lax.cond(x[0, 0] > 0, lambda: x @ p["layers"][0], lambda: x * p["b"][None]))


def checkpointed(p, x):
    return jnp.sum(jax.checkpoint(jax.jit(lambda w: jnp.sin(x @ w)))(p["layers"][1]))


def stopped(p, x):
    return jnp.sum(x * p["b"][None] + lax.stop_gradient(x @ p["layers"][0]))


def carried(p, x):
    """What a loop hands from one carry to the other; another carry goes round by itself."""

    def body(carry, _):
        _, right, apart = carry
        return (right, right * p["b"][0], apart * 2), None

    return lax.scan(body, (x[0, 0], p["idle"][0, 0], p["layers"][0, 0, 0]), None, length=3)[0][0]


def averaged(p, x):
    return lax.pmean(jnp.sum(x * p["b"][None]), "data")


@pytest.mark.parametrize(
    ("objective", "used"),
    [
        (scanned, "layers"),
        (branched, "layers b"),
        (checkpointed, "layers"),
        (stopped, "b"),
        (carried, "b idle"),
        (averaged, "b"),
        (lambda p, x: jnp.sum(x), ""),
    ],
)
def test_leaves_without_gradient_are_found(objective, used):
    p = {"layers": jnp.ones((3, 4, 4)), "idle": jnp.ones((3, 2)), "b": jnp.ones(4)}
    found = jd.transforms.find_unused_parameters(objective, p, jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert found == {name: name not in used.split() for name in p}


def test_unused_with_aux_and_errors():
    p = jax.eval_shape(with_head)
    assert jd.transforms.find_unused_parameters(lambda p, d: (loss(p, d), p["head"]), p, batch(), has_aux=True) == MASK
    with pytest.raises(ValueError, match=r"one number, got shape \(6,\)"):
        jd.transforms.find_unused_parameters(lambda p: p["w"].sum(1), params())


# ---- the recipe


def all_used(p, data):
    return loss(p, data) + (jnp.mean(p["head"]["kernel"] ** 2) + jnp.mean(p["head"]["bias"])) * data["x"].mean()


def after_one_step(mesh, reduce, objective):
    """The collectives of a step of SGD on 8 workers, and the parameters after it."""
    tx = optax.chain(reduce, optax.sgd(0.1))
    state = jd.init_state(lambda: TrainState(with_head(), tx.init(with_head())), mesh)
    step = make_step(tx, grad=jd.local_value_and_grad(objective))
    program = jd.distribute(step, mesh, donate=False).lower(state, batch()).compile()
    state, _ = program(state, jax.device_put(batch(), jax.NamedSharding(mesh, P("data"))))
    return jd.analysis.collectives(program).ops, state.params


def by_one_worker(objective):
    gradient = jax.jit(jax.grad(objective))(with_head(), batch())
    return jax.tree.map(lambda p, g: p - 0.1 * g, with_head(), gradient)


def test_buckets_are_messages_and_change_nothing(mesh):
    reduce = jd.recipes.ddp(bucket_bytes=4000, first_bucket_bytes=100)
    whole, bucketed = (after_one_step(mesh, tx, all_used) for tx in (jd.recipes.ddp(), reduce))
    for ops, found in (whole, bucketed):
        assert sum(op.bytes for op in ops) == SIZE + 4 * 2050 + 4
        assert_close(found, by_one_worker(all_used), 1e-6)
    # The vectors b and bias close the first bucket; the kernel and w have each one of their own.
    messages = [sum(op.messages for op in ops) for ops, _ in (whole, bucketed)]
    assert messages[1] - messages[0] == 2


BLOCKS = [f"block_{i}" for i in range(12)]
FORWARD = ("embedding", *BLOCKS, "head")


def transformer():
    """As flax names it; all layers have different sizes, in forward order 10, 11, ... entries."""
    sizes = {name: 10 + i for i, name in enumerate(FORWARD)}
    return {"params": {name: {"kernel": jnp.ones(size - 3), "bias": jnp.ones(3)} for name, size in sizes.items()}}


def transformer_loss(p, x):
    for name in FORWARD:
        layer = p["params"][name]
        x = jnp.tanh(x * jnp.sum(layer["kernel"]) + jnp.sum(layer["bias"]))
    return jnp.sum(x)


def sent_buckets(tree, **options):
    """The entries of each bucket, in the order in which they are sent."""
    reducer = jd.recipes.ddp(jd.error_feedback(jd.compressed(jd.top_k(0.5))), **options)
    like = jax.eval_shape(lambda: tree)
    state = jax.eval_shape(reducer.init, like).reducer
    state = state[False] if isinstance(state, dict) else state
    return [sum(x.size for x in jax.tree.leaves(part.residual.value)) for part in state]


def test_buckets_leave_in_the_order_of_the_backward_pass():
    tree, caps = transformer(), {"bucket_bytes": 4, "first_bucket_bytes": None}
    order = jd.schedule.forward_order(transformer_loss, tree, jnp.ones(2))
    assert order == FORWARD
    backward = [size for i in reversed(range(14)) for size in (7 + i, 3)]
    assert sent_buckets(tree, **caps, layers=order) == backward
    # What is not used costs nothing, and need not be left out of the order.
    found = sent_buckets(tree, **caps, layers=order, unused=lambda path, leaf: "bias" in path or "head" in path)
    assert found == backward[2::2]
    # Without a loss the numbers in names are numbers, and the embedding comes between blocks and head.
    assert sent_buckets(tree, **caps)[::2] == [20, 7, *range(19, 7, -1)]
    with pytest.raises(ValueError, match="layers names 'head', but the parameters have 'block_0'"):
        sent_buckets(tree, **caps, layers=["head"])


def test_a_bucket_has_neighbors_of_the_backward_pass():
    """The small one is ready last: the embedding and the first block, not whatever is first in the alphabet."""
    caps = {"bucket_bytes": 4 * 40, "first_bucket_bytes": 4 * 11}
    found = sent_buckets(transformer(), **caps, layers=FORWARD)
    assert found[-1] == 10 + 3
    assert sum(found) == sum(range(10, 24))


def test_buckets_of_zero_redundancy_go_by_number_too():
    like = {f"block_{i}": jax.ShapeDtypeStruct(((i + 1) << 20,), jnp.float32) for i in range(11)}
    found = [{int(sorted(like)[i][6:]) for i in members} for members in buckets_of(like, 2)]
    assert found == [{10}, {9}, {8}, {7}, {6}, {4, 5}, {0, 1, 2, 3}]


def test_unused_leaves_cost_nothing_and_stay(mesh):
    mask = jd.transforms.find_unused_parameters(loss, with_head(), batch())
    assert mask == MASK
    # All leaves have gradients here: what is not sent is what the mask says.
    ops, found = after_one_step(mesh, jd.recipes.ddp(unused=mask), all_used)
    assert sum(op.bytes for op in ops) == SIZE + 4
    assert_close(found["head"], with_head()["head"], 0)
    assert_close(found, {**by_one_worker(loss), "head": with_head()["head"]}, 1e-6)


# ---- what travels: 16 bits, and any hook


def mean_of(tx, gradients):
    """The mean that 8 workers find, and the bytes of its program; gradients `[8, *s]`."""

    def one(rows):
        gradient = jax.tree.map(lambda x: x[0], rows)
        return tx.update(gradient, tx.init(gradient))[0]

    mesh = jd.make_mesh({"data": 8})
    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P()))
    program = step.lower(gradients).compile()
    return step(gradients), jd.analysis.collectives(program)


def test_float16_on_the_wire_is_divided_before_it_is_added():
    """Integers below 2048 / W are exact; a sum of eight times 57344 would be infinite."""
    rows = np.random.default_rng(0).integers(-256, 257, (8, 5, 40)).astype(np.float32) * 8
    large = np.full((8, 8), 57344, np.float32)
    found, sent = mean_of(jd.recipes.ddp(reduce_dtype=jnp.float16), {"w": rows, "large": large})
    np.testing.assert_array_equal(found["w"], rows.mean(0))
    np.testing.assert_array_equal(found["large"], large[0])
    assert [(op.kind, op.dtype, op.bytes) for op in sent.ops] == [("all-reduce", "float16", 2 * 208)]


def test_a_matrix_stays_one_for_power_sgd():
    """Rank 4 of 4 columns: the mean itself. Buckets of a flat vector would not be compressed at all."""
    rng = np.random.default_rng(0)
    right = rng.standard_normal((4, 32))
    rows = (rng.standard_normal((8, 64, 4)) @ right).astype(np.float32)  # one right factor: the mean has rank 4
    found, sent = mean_of(jd.recipes.ddp(jd.power_sgd(rank=4)), {"w": rows})
    np.testing.assert_allclose(found["w"], rows.mean(0), atol=1e-4)
    assert sum(op.bytes for op in sent.ops) == 4 * 4 * (64 + 32)


def test_what_the_recipe_refuses():
    with pytest.raises(ValueError, match="reduce_dtype is the dtype of the default mean"):
        jd.recipes.ddp(jd.exact(), reduce_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        jd.recipes.ddp(bucket_bytes=0)
    with pytest.raises(ValueError, match="unused has no entry for the leaf 'w'"):
        jd.recipes.ddp(unused={"b": True}).init(params())
    by_name: Any = jd.recipes.ddp(unused=lambda path, leaf: path == "w").init(params())
    assert sorted(by_name.reducer) == [False]


# ---- accumulation over calls of the step


def chain():
    return optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1, momentum=0.9))


def told_step(tx):
    def step(state, data, sync=None):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params, sync=sync)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


@pytest.fixture(scope="module")
def accumulated(mesh):
    """The programs: by the count, without and with a sync; and the states after four calls, two for an update."""
    tx = jd.accumulate(chain(), 2)
    run = jd.distribute(told_step(tx), mesh, static_argnames=("sync",), donate=False)
    start = fresh(tx, mesh)
    programs = {sync: run.lower(start, batch(), sync=sync).compile() for sync in (None, False, True)}
    states = {}
    for way in ("counted", "told"):
        state = start
        for number in range(4):
            data = jax.device_put(batch(seed=number), jax.NamedSharding(mesh, P("data")))
            state, _ = programs[None if way == "counted" else bool(number % 2)](state, data)
            states[way, number] = state
    return programs, start, states


def test_k_calls_are_one_step_of_all_examples(accumulated):
    _, start, states = accumulated
    reference, tx = start.params, optax.sgd(0.1, momentum=0.9)
    opt = tx.init(reference)
    for number in (0, 2):
        data = jax.tree.map(lambda *x: np.concatenate(x), batch(seed=number), batch(seed=number + 1))
        updates, opt = tx.update(jax.jit(jax.grad(loss))(reference, data), opt)
        reference = optax.apply_updates(reference, updates)
    assert_close(states["counted", 3].params, reference, 1e-6)
    # Two programs: compilers may round their sums in different orders.
    assert_close(states["told", 3], states["counted", 3], 1e-6)


def test_between_syncs_nothing_moves(accumulated):
    _, start, states = accumulated
    for number in (0, 2):
        state = states["counted", number]
        before = states["counted", number - 1] if number else start
        assert_close((state.params, state.opt.inner), (before.params, before.opt.inner), 0)
        assert np.ptp(np.asarray(state.opt.total.value["w"]), axis=0).max() > 1e-3
    assert not np.asarray(states["counted", 3].opt.total.value["w"]).any()


def test_the_other_calls_send_nothing(accumulated):
    programs, *_ = accumulated

    def sent(sync, branch):
        return [(op.kind, op.bytes) for op in jd.analysis.collectives(programs[sync], branch=branch).ops]

    assert sent(None, "min") == sent(False, "max") == []
    assert sent(None, "max") == sent(True, "max") == [("all-reduce", SIZE)]


def test_accumulated_examples_weigh_calls_and_workers():
    """The mean over all examples of all calls."""
    tx = jd.accumulate(jd.all_reduce(jd.exact()), 2)

    def one(gradients, counts):
        state = tx.init(gradients[0])
        for gradient, count in zip(gradients, counts, strict=True):
            updates, state = tx.update(gradient, state, examples=count)
        return updates

    gradients = np.arange(16, dtype=np.float32).reshape(4, 2, 2) + 1
    counts = np.array([[1, 2], [3, 0], [0, 0], [2, 5]], np.float32)
    found = jax.jit(jax.vmap(one, axis_name="data"))(gradients, counts)
    wanted = (gradients * counts[..., None]).sum((0, 1)) / counts.sum()
    np.testing.assert_allclose(found, np.broadcast_to(wanted, (4, 2)), rtol=1e-6)


def test_what_accumulate_refuses(mesh):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        jd.accumulate(chain(), 0)
    tx = jd.accumulate(jd.all_reduce(jd.exact(), axis=None), axis=None)
    with pytest.raises(ValueError, match="or pass sync= to the update"):
        tx.update(params(), tx.init(params()))
    with pytest.raises(ValueError, match="must be static"):
        tx.update(params(), tx.init(params()), sync=jnp.array(True))
    tx = optax.MultiSteps(chain(), 2)
    with pytest.raises(ValueError, match=r"accumulate\(tx, k\)"):
        jd.distribute(make_step(tx), mesh)(fresh(tx, mesh), batch())
