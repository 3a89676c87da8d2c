"""Finding the k largest entries without a sort."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdist as jd
from jaxdist.compressors import largest as search

SIZE = 9001  # above `SMALL`, odd, no multiple of a word


def data(size=SIZE, seed=0):
    """Rows of unlike data: smooth, heavy tailed, tied, mostly zero, sorted, over all magnitudes, not finite."""
    rng = np.random.default_rng(seed)
    few = np.where(rng.random(size) < 0.01, rng.standard_normal(size), 0.0)
    wild = np.where(rng.random(size) < 0.01, np.nan, rng.standard_normal(size))
    wild[[3, 700]] = -np.inf, np.inf
    rows = {
        "gaussian": rng.standard_normal(size),
        "cauchy": rng.standard_cauchy(size),
        "rounded": np.round(rng.standard_cauchy(size)),
        "equal": np.full(size, -2.0),
        "zeros": np.zeros(size),
        "few": few,
        "two values": np.where(rng.random(size) < 0.02, 5.0, 1e-3),
        "sorted": np.sort(rng.standard_normal(size)),
        "tiny": rng.integers(0, 2**23, size).astype(np.int32).view(np.float32),
        "all magnitudes": 10.0 ** rng.uniform(-37, 38, size),
        "not finite": wild,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def largest(row, count):
    magnitudes = np.where(np.isnan(row), np.inf, np.abs(np.asarray(row, np.float32)))
    magnitudes = np.where(magnitudes < np.finfo(np.float32).tiny, 0.0, magnitudes)
    return np.sort(np.argsort(-magnitudes, kind="stable")[:count])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("count", [1, 90, 3000])
def test_threshold_finds_the_largest_ties_to_the_lower_index(count):
    rows = data()
    # Each is a problem of its own under vmap: the loop goes on until all are done.
    found = jax.jit(jax.vmap(lambda x: search.largest_by_threshold(x, count)))(np.stack(list(rows.values())))
    for (name, row), where in zip(rows.items(), found, strict=True):
        np.testing.assert_array_equal(where, largest(row, count), err_msg=name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1000, 2, 33, 5242])
def test_the_search_that_tpus_do_of_short_vectors_finds_the_same(size):
    rows = data(size + 701)
    cut = np.stack([row[:size] for row in rows.values()])
    found = jax.jit(jax.vmap(lambda x: search._largest_by_search(x, size // 2)))(cut)
    for name, row, where in zip(rows, cut, found, strict=True):
        np.testing.assert_array_equal(where, largest(row, size // 2), err_msg=name)


def unlike_rows(rows, width, seed=1):
    """Rows of different scales, the first of them with ties, zeros and entries that are not finite."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-5, 5, (rows, 1))).astype(np.float32)
    for i, large in enumerate((1, 5, 8, 14, 30)):
        # Ties behind so many larger entries: of 8, and of all others.
        rank = rng.permutation(width)
        x[i] = np.select([rank < large, rank < large + 8], [5.0 + rank, 4.0], 1e-3)
        x[5 + i] = 4.0
        x[5 + i, -large:] = 5.0
        # Fewer nonzeros than are kept, and magnitudes that count as zero before them.
        x[10 + i] = 0.0
        x[10 + i, -large // 4 :] = 1e-5
        x[10 + i, ::3] = 1e-39
        x[15 + i, -large:] = np.nan
        x[20 + i, -large::2], x[20 + i, -large + 1 :: 2] = np.inf, np.nan
    x[25:28] = np.array([[np.nan], [0.0], [-np.inf]])
    return x


# The candidates of 120 rows are few enough to be sorted; 40 of 100 entries are searched without candidates.
@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("rows", "width", "count"), [(480, 100, 9), (480, 96, 9), (120, 100, 9), (480, 100, 1), (120, 100, 40)]
)
def test_rows_are_searched_side_by_side(rows, width, count):
    x = unlike_rows(rows, width)
    expected = np.concatenate([largest(row, count) + i * width for i, row in enumerate(x)])
    np.testing.assert_array_equal(jax.jit(lambda x: search.largest_by_threshold(x, count))(x), expected)


def test_rows_are_sorted_side_by_side():
    x = np.random.default_rng(1).integers(-20, 20, (120, 96)).astype(np.float32)
    expected = np.concatenate([largest(row, 9) + i * 96 for i, row in enumerate(x)])
    np.testing.assert_array_equal(jax.jit(lambda x: search.largest_by_sorting(x, 9))(x), expected)


def test_candidates_are_chosen_alike_on_all_backends():
    """A CPU searches them, a GPU sorts them, a TPU has none: ties, infinities and zeros have one order in all."""
    x = unlike_rows(480, 100)
    expected = np.concatenate([largest(row, 9) + i * 100 for i, row in enumerate(x)])
    for platform in ("tpu", "default"):

        def choose(*operands, default, platform=platform, **forms):
            return forms.get(platform, default)(*operands)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", choose)
            np.testing.assert_array_equal(jax.jit(lambda x: search.largest_by_threshold(x, 9))(x), expected)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("width", [4, 5])
def test_rows_may_be_short(width):
    x = np.random.default_rng(0).integers(-9, 9, (2500, width)).astype(np.float32)
    expected = np.concatenate([largest(row, 1) + i * width for i, row in enumerate(x)])
    np.testing.assert_array_equal(jax.jit(lambda x: search.largest_by_threshold(x, 1))(x), expected)


@pytest.mark.parametrize("find", [search.largest_by_threshold, search.largest_by_sorting])
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_is_found_in_nothing(find, shape):
    assert find(jnp.zeros(shape), 0).shape == (0,)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_other_dtypes(dtype):
    with jax.enable_x64(True):
        x = jnp.asarray(data()["gaussian"], dtype)
        with jax.numpy_dtype_promotion("strict"):
            found = jax.jit(lambda x: search.largest_by_threshold(x, 90))(x)
    np.testing.assert_array_equal(found, largest(np.asarray(x, np.float32), 90))


@pytest.mark.parametrize(("most", "gaussian"), [(90, 8), (180, 1)])
def test_any_data_end_the_search(most, gaussian):
    """Newton's method gains nothing on data whose density jumps; halving every second time does."""
    rows = data()
    found = jax.jit(jax.vmap(lambda x: search._search(x, 90, most).passes))(np.stack(list(rows.values())))
    found = dict(zip(rows, found.tolist()))
    assert max(found.values()) <= search.FREE_PASSES + 2 * 32
    assert found["gaussian"] <= gaussian
    assert found["zeros"] == 1
    assert found["equal"] == 2


@pytest.mark.parametrize("case", ["alike", "scales", "few nonzeros", "not finite"])
def test_rows_unlike_the_others_do_not_prolong_the_search(case):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 4096))
    if case == "scales":
        x *= 10.0 ** rng.uniform(-5, 5, (128, 1))
    if case == "few nonzeros":
        x[-1, 50:], x[-2], x[-3, 100:] = 0.0, 0.0, 0.0
    if case == "not finite":
        x[-1], x[-2, 5] = np.nan, np.inf
    passes = jax.jit(lambda x: search._search(x, 64, 128).passes)(x.astype(np.float32))
    assert passes <= {"alike": 2, "scales": 4, "few nonzeros": 4, "not finite": 4}[case]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count", "most"), [((2**18,), 2000, 2**19), ((64, 4096), 64, 2**20)])
def test_the_loop_keeps_no_copy_of_the_array(shape, count, most):
    """XLA would compute `|x|`, 2 MiB, once before the loop; fetching fresh memory takes longer than all passes.

    Candidates are a thirty-second of the rows, with their positions and flags: 0.51 MiB in all with jax 0.12.
    """
    x = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    find = jax.vmap(lambda x: search.largest_by_threshold(x, count))
    assert jax.jit(find).lower(x).compile().memory_analysis().temp_size_in_bytes < most


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count"), [((SIZE,), 90), ((120, 100), 9), ((480, 100), 9)])
def test_types_under_shard_map(mesh, shape, count):
    def worker(x):
        return search.largest_by_threshold(x.reshape(shape), count)

    size = math.prod(shape)
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    kept = size // shape[-1] * count
    assert jax.eval_shape(mapped, jax.ShapeDtypeStruct((8 * size,), jnp.float32)).shape == (8 * kept,)


def test_the_code_under_distribute_is_the_code_alone(mesh):
    code = jd.top_k(0.01)
    x = np.random.default_rng(0).standard_cauchy((8, SIZE)).astype(np.float32)

    def worker(x):
        return code.decompress(code.compress(x[0], jax.random.key(0)), x[0])[None]

    found = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x)
    for row, out in zip(x, np.asarray(found)):
        np.testing.assert_array_equal(np.flatnonzero(out), largest(row, 90))
        np.testing.assert_array_equal(out[out != 0], row[out != 0])
