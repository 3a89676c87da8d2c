"""Unequal data and unequal values in one process; `test_processes` has two."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd


def rows(number, size=8):
    return {"x": np.full((size, 3), number, np.float32)}


class Lying(list):
    def __len__(self):
        return 1


def test_batches_of_one_process_come_as_they_are(mesh):
    for source in ([rows(1), rows(2)], iter([rows(1), rows(2)])):
        found = list(jd.runtime.join_uneven(source, rows(0), mesh, prefetch=2))
        assert [(float(batch["x"].mean()), examples.tolist()) for batch, examples in found] == [
            (1, [1] * 8),
            (2, [1] * 8),
        ]
        assert found[0][0]["x"].sharding.spec == jax.P("data")
    assert (
        list(jd.runtime.join_uneven([], rows(0), mesh)) == list(jd.runtime.join_uneven(iter([]), rows(0), mesh)) == []
    )


def test_padded_batches_say_how_many_rows_are_real(mesh):
    """With `any_batch` the mean is that of the real rows, wherever they lie."""
    like = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    ((batch, examples),) = jd.runtime.join_uneven(
        [np.arange(33, dtype=np.float32).reshape(11, 3)], like, mesh, pad=True
    )
    assert examples.tolist() == [2, 2, 2, 2, 2, 1, 0, 0]
    assert float(batch[11:].sum()) == 0
    tx = jd.recipes.ddp()

    def one(x, count):
        _, gradient = jd.online.any_batch(lambda p, x: x @ p)(jnp.zeros(3), x, count)
        return tx.update(gradient, tx.init(gradient), examples=count)[0]

    found = jax.jit(jax.vmap(one, axis_name="data"))(batch.reshape(8, 2, 3), examples)
    np.testing.assert_allclose(found[3], np.arange(33).reshape(11, 3).mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([rows(1)], {"on_uneven": "hope"}, "hope"),
        ([rows(1)], {"prefetch": 0}, "prefetch must be at least 1, got 0"),
        ([rows(1)], {"like": rows(0, 12)}, r"multiple of this process's 8 workers, got \[\(12, 3\)\]"),
        ([rows(1, 5)], {}, "batch 0 has 5 rows where like has 8: drop it, or pass pad=True"),
        ([rows(1), rows(1, 16)], {}, r"batch 1 has an array float32\(16, 3\) where like has float32\(8, 3\)"),
        ([{"x": np.ones((8, 3), int)}], {}, "where like has float32"),
        ([{"y": np.ones((8, 3))}], {}, "batch 0 is a PyTreeDef"),
        (Lying([rows(1), rows(2)]), {}, r"len\(batches\) is 1, but it yielded more"),
    ],
)
def test_what_join_refuses(mesh, source, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        list(jd.runtime.join_uneven(source, **{"like": rows(0), "mesh": mesh, **options}))


def test_divisors():
    """Workers that are done leave the mean, or stay in it with nothing."""
    gradients, examples = np.arange(8, dtype=np.float32) + 1, np.array([1, 2, 0, 1, 4, 0, 1, 1])
    wanted = {"active": np.average(gradients, weights=examples), "workers": (gradients * (examples > 0)).sum() / 8}
    reducers = {"plain": jd.exact(), "coded": jd.compressed(jd.compressors.identity())}
    options: Any = [{"normalize_by": divisor} for divisor in wanted]
    txs = {
        (name, given["normalize_by"]): jd.all_reduce(reducers[name], **given) for name in reducers for given in options
    }

    def one(g, n):
        return {kind: tx.update(g, tx.init(g), examples=n) for kind, tx in txs.items()}

    run = jax.jit(jax.vmap(one, axis_name="data"))
    found, none = run(gradients, examples), run(np.full(8, np.nan, np.float32), 0 * examples)
    for kind in txs:
        np.testing.assert_allclose(found[kind][0], wanted[kind[1]], rtol=1e-6)
        assert not none[kind][0].any()
        assert none[kind][1].empty.tolist() == [1] * 8
    unknown: Any = {"normalize_by": "both"}
    with pytest.raises((ValueError, TypeError), match="both"):
        jd.all_reduce(jd.exact(), **unknown)


def test_one_process_agrees_with_itself():
    tree = {"w": np.ones(3), "k": jax.random.key(0), "n": None}
    jd.processes.assert_same(tree)
    same = jd.processes.broadcast(tree)
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    assert same["k"] == tree["k"]
    with pytest.raises(ValueError, match="one of the 1 processes, from 0, got 1"):
        jd.processes.broadcast(tree, source=1)
