"""Micro-batches of a loss that is a mean over a number of the batch: they give the step of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from problems import assert_close, batch, params

import jaxdist as jd

COUNTS = [4, 1, 2, 3]


def masked_batch(counts=COUNTS):
    rows = 16 // len(counts)
    return {
        **batch(),
        "mask": (np.arange(16) % rows < np.repeat(counts, rows)).astype(np.float32),
        "other": (np.arange(16) % 3 > 0).astype(np.float32),
    }


def errors_of(params, data):
    return jnp.square(jnp.tanh(data["x"] @ params["w"] + params["b"][None]) - data["y"]).mean(1)


def reference(data):
    """The masked mean and its gradient with respect to `w`, in float64."""
    w, b = (np.asarray(params()[name], np.float64) for name in "wb")
    x, y, mask = (np.asarray(data[name], np.float64) for name in ("x", "y", "mask"))
    output = np.tanh(x @ w + b)
    value = (mask * ((output - y) ** 2).mean(1)).sum() / mask.sum()
    return value, x.T @ (mask[:, None] * 2 * (output - y) / y.shape[1] * (1 - output**2)) / mask.sum()


def guarded(total, mask):
    number = mask.sum()
    return jnp.where(number > 0, total / jnp.where(number > 0, number, 1), 0.0)


# Of the sum of the errors of the valid rows, and the mask.
OF_SUMS = {
    "quotient": lambda total, mask: total / mask.sum(),
    "at least one": lambda total, mask: total / jnp.maximum(mask.sum(), 1),
    "clip": lambda total, mask: total / jnp.clip(mask.sum(), 1),
    "where": guarded,
    "any": lambda total, mask: jnp.where(mask.any(), total / jnp.maximum(mask.sum(), 1), 0.0),
    "means": lambda total, mask: total / mask.size / jnp.maximum(jnp.mean(mask), 1e-6),
    "inverse": lambda total, mask: total * (1 / mask.sum()),
    "inside jit": lambda total, mask: jax.jit(lambda x: x / mask.sum())(total),
    "integers": lambda total, mask: total / jnp.count_nonzero(mask),
    "twice": lambda total, mask: 0.25 * (total / mask.sum()) + 0.75 * (total / mask.sum()),
    "small offset": lambda total, mask: total / (mask.sum() + 1e-8),
    "finite": lambda total, mask: jnp.nan_to_num(total / mask.sum()),
    "where finite": lambda total, mask: (lambda x: jnp.where(jnp.isfinite(x), x, 0))(total / mask.sum()),
    "product with ones": lambda total, mask: total / (mask @ jnp.ones(mask.shape)),
    "a loop": lambda total, mask: lax.fori_loop(0, 2, lambda _, t: t + total / mask.sum() / 2, 0.0),
}
# Of the errors of the rows.
OF_ROWS = {
    "mean": lambda errors, mask: jnp.mean(errors, where=mask > 0),
    "average": lambda errors, mask: jnp.average(errors, weights=mask),
    "normalized": lambda errors, mask: jnp.sum(errors * (mask / mask.sum())),
    "mean of normalized": lambda errors, mask: jnp.mean(errors * (mask / mask.mean())),
    "product": lambda errors, mask: errors @ (mask / mask.sum()),
    "rows": lambda errors, mask: jnp.sum(jnp.where(mask > 0, errors / mask.sum(), 0)),
    **{name: lambda errors, mask, f=f: f(jnp.sum(errors * mask), mask) for name, f in OF_SUMS.items()},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mean", OF_ROWS.values(), ids=OF_ROWS)
def test_parts_of_a_masked_mean_count_as_their_number(mean):
    data = masked_batch()
    f = jd.local_value_and_grad(lambda params, data: mean(errors_of(params, data), data["mask"]), micro_batches=4)
    value, gradient = jax.jit(f)(params(), data)
    assert_close((value, gradient["w"]), reference(data), 1e-6)


def test_parts_without_rows_are_left_out():
    data = masked_batch([0, 4, 0, 1])
    for name in ("quotient", "at least one", "where", "any", "means"):
        f = jd.local_value_and_grad(
            lambda params, data, name=name: OF_ROWS[name](errors_of(params, data), data["mask"]), micro_batches=4
        )
        value, gradient = jax.jit(f)(params(), data)
        assert_close((value, gradient["w"]), reference(data), 1e-6)
        nothing = jax.jit(f)(params(), {**data, "mask": 0 * data["mask"]})
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing))


def test_a_bound_above_the_number_of_the_batch():
    """The loss of the whole is divided by the bound, and so are its parts."""

    def f(params, data):
        weights = 0.01 * data["mask"]
        return jnp.sum(errors_of(params, data) * weights) / jnp.maximum(weights.sum(), 1)

    found = jax.jit(jd.local_value_and_grad(f, micro_batches=4))(params(), masked_batch())
    assert_close(found, jax.jit(jax.value_and_grad(f))(params(), masked_batch()), 1e-6)


def heads(params, data):
    """The errors of each row and output."""
    return jnp.square(jnp.tanh(data["x"] @ params["w"]) - data["y"])


def masked_mean(errors, mask):
    return jnp.sum(errors * mask) / jnp.sum(mask)


def over_heads(params, data):
    def add_head(total, head):
        w, y = head
        return total + masked_mean(jnp.square(jnp.tanh(data["x"] @ w) - y), data["mask"]), None

    return lax.scan(add_head, 0.0, (params["w"].T, data["y"].T))[0]


EXACT = {
    "heads, by scan": over_heads,
    "heads, by fori_loop": lambda p, d: lax.fori_loop(
        0, 2, lambda i, t: t + masked_mean(heads(p, d)[:, i], d["mask"]), 0.0
    ),
    "heads, by map": lambda p, d: lax.map(
        jax.checkpoint(lambda w: masked_mean(jnp.tanh(d["x"] @ w), d["mask"])), p["w"].T
    ).mean(),
    "heads, and a penalty": lambda p, d: over_heads(p, d) + jnp.sum(p["w"] ** 2),
    "a sum by scan": lambda p, d: (
        lax.scan(lambda t, e: (t + jnp.sum(e * d["mask"]), None), 0.0, heads(p, d).T)[0] / d["mask"].sum()
    ),
    "offset": lambda p, d: jnp.sum(heads(p, d).mean(1) * d["mask"]) / (1 + d["mask"].sum()),
    "offset of a mean": lambda p, d: jnp.mean(heads(p, d).mean(1) * d["mask"]) / (d["mask"].mean() + 0.5),
    "small offset, and a penalty": lambda p, d: (
        jnp.sum(heads(p, d).mean(1) * d["mask"]) / (d["mask"].sum() + 1e-8) + jnp.sum(p["w"] ** 2)
    ),
    # Each row has its own divisor.
    "rows": lambda p, d: (jnp.sum(heads(p, d) * d["weights"], 1) / d["weights"].sum(1)).mean(),
    "rows of columns": lambda p, d: (jnp.sum((heads(p, d) * d["weights"]).T, 0) / d["weights"].T.sum(0)).mean(),
    "rows, by vmap": lambda p, d: jax.vmap(masked_mean, in_axes=1)(heads(p, d).T, d["weights"].T).mean(),
    "rows, by map": lambda p, d: lax.map(lambda r: masked_mean(heads(p, r), r["weights"]), d).mean(),
    "rows, by fori_loop": lambda p, d: lax.fori_loop(
        0, len(d["x"]), lambda i, t: t + masked_mean(heads(p, d)[i], d["weights"][i]) / len(d["x"]), 0.0
    ),
    "rows of unit length": lambda p, d: lax.map(lambda r: heads(p, {**r, "x": r["x"] / jnp.sum(r["x"])}), d).mean(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", EXACT.values(), ids=EXACT)
def test_parts_give_the_step_of_the_whole(loss):
    data = {**masked_batch(), "weights": 1 + np.arange(masked_batch()["y"].size, dtype=np.float32).reshape(16, -1) % 5}
    found = jax.jit(jd.local_value_and_grad(loss, micro_batches=4))(params(), data)
    expected = jax.jit(jax.value_and_grad(loss))(params(), data)
    assert_close((found[0], found[1]["w"]), (expected[0], expected[1]["w"]), 1e-5)


STATISTICS = {
    "columns": lambda p, d: (jnp.sum(heads(p, d) * d["weights"], 0) / d["weights"].sum(0)).mean(),
    "columns, kept": lambda p, d: jnp.sum(heads(p, d) * d["weights"] / d["weights"].sum(0, keepdims=True)),
    "columns, where": lambda p, d: jnp.mean(heads(p, d), axis=0, where=d["weights"] > 2).sum(),
    "columns, by vmap": lambda p, d: jax.vmap(masked_mean, in_axes=1)(heads(p, d), d["weights"]).sum(),
    "columns, by map": lambda p, d: lax.map(lambda x: masked_mean(*x), (heads(p, d).T, d["weights"].T)).sum(),
    "columns, by scan": lambda p, d: lax.scan(
        lambda t, x: (t + masked_mean(*x), None), 0.0, (heads(p, d).T, d["weights"].T)
    )[0],
    "the largest": lambda p, d: jnp.sum(heads(p, d) / d["weights"].max(0, keepdims=True)),
    "weights of classes": lambda p, d: jnp.mean(heads(p, d) * (1 / d["weights"].sum(0))[None]),
    "weights of the class of a row": lambda p, d: jnp.sum(
        heads(p, d).mean(1) / d["weights"].sum(0)[(d["mask"] > 0).astype(int)]
    ),
    "a squared sum by scan": lambda p, d: (
        lax.scan(lambda t, e: (t + jnp.sum(e * d["mask"]) ** 2, None), 0.0, heads(p, d).T)[0] / d["mask"].sum()
    ),
    "a large offset and a penalty": lambda p, d: (
        jnp.sum(heads(p, d).mean(1) * d["mask"]) / (d["mask"].sum() + 1) + jnp.sum(p["w"] ** 2)
    ),
}


@pytest.mark.parametrize("loss", STATISTICS.values(), ids=STATISTICS)
def test_other_statistics_of_the_rows_need_weights(loss):
    data = {**masked_batch(), "weights": 1 + np.arange(masked_batch()["y"].size, dtype=np.float32).reshape(16, -1) % 5}
    with pytest.raises(ValueError, match="pass weights="):
        jax.eval_shape(jd.local_value_and_grad(loss, micro_batches=4), params(), data)


OF_PARTS = {
    "inputs": lambda p, d: heads(
        p, {**d, "x": (d["x"] - d["x"].mean(0, keepdims=True)) / d["x"].std(0, keepdims=True)}
    ).mean(),
    "targets": lambda p, d: heads(p, {**d, "y": d["y"] / d["y"].std(0, keepdims=True)}).mean(),
    "batch normalization": lambda p, d: (lambda h: jnp.square(h / (1 + h.std(0, keepdims=True))).mean())(
        d["x"] @ p["w"]
    ),
    "contrastive": lambda p, d: (lambda z: jax.nn.log_softmax(z @ z.T).mean())(d["x"] @ p["w"]),
    "one number of rows": lambda p, d: jnp.mean(heads(p, d).reshape(4, -1).sum(1) / d["y"].reshape(4, -1).sum(1)),
}


@pytest.mark.parametrize("loss", OF_PARTS.values(), ids=OF_PARTS)
def test_statistics_that_a_model_computes_are_those_of_parts(loss):
    jax.eval_shape(jd.local_value_and_grad(loss, micro_batches=4), params(), batch())


@pytest.mark.parametrize("counts", [[0, 4, 0, 1], [0, 0, 0, 0]])
def test_terms_of_parts_without_rows_that_count(counts):
    """The loss of all rows, divided by the number of some of them, as in the detection of objects."""

    def f(params, data):
        return jnp.sum(errors_of(params, data)) / jnp.maximum(data["mask"].sum(), 1)

    found = jax.jit(jd.local_value_and_grad(f, micro_batches=4))(params(), masked_batch(counts))
    assert_close(found, jax.jit(jax.value_and_grad(f))(params(), masked_batch(counts)), 1e-5)


def test_terms_without_the_batch_count_once():
    def f(params, data):
        total = jnp.sum(errors_of(params, data) * data["mask"])
        penalty = 0.1 * jnp.sum(params["w"] ** 2)
        return jnp.exp(params["b"][0]) * total / jnp.maximum(data["mask"].sum(), 1) + penalty

    for data in (masked_batch(), masked_batch([0, 4, 0, 1])):
        found = jax.jit(jd.local_value_and_grad(f, micro_batches=4))(params(), data)
        assert_close(found, jax.jit(jax.value_and_grad(f))(params(), data), 1e-6)


def test_losses_of_optax_over_labels_to_ignore():
    labels = np.where(masked_batch()["mask"] > 0, np.arange(16) % 4, -1)

    def f(params, data):
        is_valid = data["labels"] >= 0
        errors = optax.losses.softmax_cross_entropy_with_integer_labels(
            data["x"] @ params["w"], jnp.where(is_valid, data["labels"], 0)
        )
        return errors.mean(where=is_valid)

    data = {"x": batch()["x"], "labels": labels}
    found = jax.jit(jd.local_value_and_grad(f, micro_batches=4))(params(), data)
    assert_close(found, jax.jit(jax.value_and_grad(f))(params(), data), 1e-6)


def test_auxiliary_data_scales_and_random_masks():
    """All of them as with `weights=`, of which the number is the one that the loss draws."""

    def draw(key, data):
        return jax.random.bernoulli(key, 0.6, (len(data["mask"]),)) * data["mask"]

    def f(params, data, key):
        errors, mask = errors_of(params, data), draw(key, data)
        value = jnp.sum(errors * mask) / jnp.maximum(mask.sum(), 1)
        return value, {"value": value, "rows": mask.astype(jnp.int32).sum()}

    key, data = jax.random.key(3), masked_batch()
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(4))
    drawn = {**data, "mask": jax.vmap(draw)(keys, {"mask": data["mask"].reshape(4, 4)}).reshape(16)}
    (value, aux), gradient = jax.jit(jd.local_value_and_grad(f, has_aux=True, micro_batches=4, scale=8.0))(
        params(), data, key
    )
    wanted = reference(drawn)
    assert_close((value, gradient["w"] / 8), wanted, 1e-6)
    assert_close(aux["value"], wanted[0], 1e-6)
    assert int(aux["rows"]) == int(drawn["mask"].sum())


def test_workers_with_other_masks_take_the_step_of_one_device():
    data = masked_batch([4, 1, 2, 0])

    def f(params, data):
        return jnp.sum(errors_of(params, data) * data["mask"]) / jnp.maximum(data["mask"].sum(), 1)

    tx = jd.all_reduce(jd.exact())

    def step(params, data):
        _, gradient = jd.local_value_and_grad(f, micro_batches=2)(params, data)
        return tx.update(gradient, tx.init(params), params, examples=data["mask"].sum())[0], {}

    found, _ = jd.simulate(step, 2)(params(), data)
    assert_close(found["w"], reference(data)[1], 1e-6)


def test_shards_weigh_workers_too():
    layer = jd.zero.gathered(errors_of)

    def f(params, data):
        return jnp.sum(layer(params, data) * data["mask"]) / jnp.maximum(data["mask"].sum(), 1)

    def step(state, data):
        return {"params": jd.local_value_and_grad(f, micro_batches=2)(state["params"], data)[1]}, {}

    data = masked_batch([4, 1, 0, 3])
    state = jd.init_state(lambda: {"params": jd.zero.shard(params(), smallest=0)}, 2)
    state, _ = jd.simulate(step, 2)(state, data)
    found = state["params"]["w"].value[: params()["w"].size].reshape(params()["w"].shape)
    assert_close(found, reference(data)[1], 1e-5)


def test_only_the_number_is_computed_twice():
    """What the loss prints is printed once for each part, and nothing but the loop is added for other losses."""
    printed = []

    def f(params, data):
        jax.debug.callback(printed.append, data["mask"].sum())
        return jnp.sum(errors_of(params, data) * data["mask"]) / data["mask"].sum()

    jax.block_until_ready(jax.jit(jd.local_value_and_grad(f, micro_batches=4))(params(), masked_batch()))
    jax.effects_barrier()
    assert sorted(map(float, printed)) == sorted(COUNTS)
    traced = jax.make_jaxpr(jd.local_value_and_grad(lambda *args: errors_of(*args).mean(), micro_batches=4))
    assert [e.primitive.name for e in traced(params(), masked_batch()).eqns].count("scan") == 1


def over_the_rows(params, data):
    def add(carry, row):
        errors = errors_of(params, jax.tree.map(lambda x: x[None], row))
        return (carry[0] + (errors * row["mask"]).sum(), carry[1] + row["mask"]), None

    (total, number), _ = lax.scan(add, (0.0, 0.0), data)
    return total / number


def mean_of(errors, mask):
    return jnp.sum(errors * mask) / jnp.maximum(mask.sum(), 1)


OTHERS = {
    "power": lambda e, m, _: jnp.sum(e * m) * jnp.maximum(jnp.sum(m), 1) ** -1,
    "cond": lambda e, m, _: jax.lax.cond(jnp.sum(m) > 0, lambda: jnp.sum(e * m) / jnp.sum(m), lambda: 0.0),
    "two divisors": lambda e, m, o: mean_of(e, m) + mean_of(e, o),
    "two divisors of rows": lambda e, m, o: jnp.sum(e * (m / m.sum() + o / o.sum())),
    "a stack": lambda e, m, o: jnp.stack([mean_of(e, m), mean_of(e, o)]).mean(),
    "the others": lambda e, m, o: jnp.sum(e * m) / (m.size - m.sum()),
    "a plain mean": lambda e, m, o: mean_of(e, m) + jnp.mean(e),
    "a product": lambda e, m, o: mean_of(e, m) * o.mean(),
    "a root": lambda e, m, o: jnp.sqrt(mean_of(e, m)),
    "a square": lambda e, m, o: jnp.sum(e * m) ** 2 / m.sum(),
    "root of the number": lambda e, m, o: jnp.sum(e * m) / jnp.sqrt(m.sum()),
    "at most": lambda e, m, o: jnp.sum(e * m) / jnp.minimum(m.sum(), 4),
    "largest": lambda e, m, o: jnp.sum(e * m) / m.max(),
    "another condition": lambda e, m, o: jnp.sum(e * m) / jnp.where(o.sum() > 0, m.sum(), 1),
    "above three": lambda e, m, o: jnp.sum(e * m) / jnp.where(m.sum() > 3, m.sum(), 3),
    "a mean by a sum": lambda e, m, o: jnp.mean(e * m) / m.sum(),
    "half of the integers": lambda e, m, o: jnp.sum(e * m) / (m.astype(jnp.int32).sum() // 2),
    "of the mask's largest": lambda e, m, o: jnp.sum(e * m) / jnp.sum(m / m.max()),
    "not a number": lambda e, m, o: jnp.nanmean(jnp.where(m > 0, e, jnp.nan)),
}


@pytest.mark.parametrize("mean", OTHERS.values(), ids=OTHERS)
def test_other_losses_need_weights(mean):
    def f(params, data):
        return mean(errors_of(params, data), data["mask"], data["other"])

    with pytest.raises(ValueError, match=r"divided by a number that is computed from the batch.* pass weights="):
        jax.eval_shape(jd.local_value_and_grad(f, micro_batches=4), params(), masked_batch())
    jax.eval_shape(jd.local_value_and_grad(f, micro_batches=4, weights=lambda data: 1), params(), masked_batch())


def test_numbers_that_loops_add_up_need_weights():
    with pytest.raises(ValueError, match="pass weights="):
        jax.eval_shape(jd.local_value_and_grad(over_the_rows, micro_batches=4), params(), masked_batch())
