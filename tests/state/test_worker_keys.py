"""Keys that differ between workers, on a mesh and in simulation: their noise is independent, also after a resize."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist._core.trees import fold_keys

WORKERS = 8
SIZE = 4096
TX = optax.chain(
    jd.transforms.per_worker(optax.add_noise(1.0, 0.0, jax.random.key(5))),
    jd.all_reduce(jd.exact()),
    optax.sgd(1.0),
)


def build():
    return TrainState(jnp.zeros(SIZE), {"chain": TX.init(jnp.zeros(SIZE))})


def step(state, batch):
    """A gradient of zero: the update is the negative mean of the noise of all workers."""
    updates, chain = TX.update(0 * batch[0], state.opt["chain"], state.params)
    return TrainState(updates, {"chain": chain}), {}


def words(keys):
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).tolist()]


def key_of(state):
    return state.opt["chain"][0].value.rng_key


def test_noise_of_workers_is_independent(mesh):
    """The mean of W independent normal numbers has the standard deviation 1/√W, that of W equal ones 1."""
    batch = jnp.zeros((WORKERS, SIZE))
    state, _ = jd.distribute(step, mesh)(jd.init_state(build, mesh), batch)
    assert np.std(state.params) == pytest.approx(WORKERS**-0.5, rel=0.05)
    simulated, _ = jd.simulate(step, WORKERS)(jd.init_state(build, WORKERS), batch)
    assert_close(state, simulated, 1e-6)


def test_place_and_init_state_fold_alike(mesh):
    assert words(key_of(jd.place(build(), mesh))) == words(key_of(jd.init_state(build, mesh)))
    expected = [jax.random.fold_in(jax.random.key(5), i) for i in range(WORKERS)]
    assert words(key_of(jd.init_state(build, WORKERS))) == words(jnp.stack(expected))


def test_nested_marks_fold_over_both_axes(pods):
    state = jd.place(jd.PerWorker(jd.PerWorker(jax.random.key(0), axis="chip"), axis="pod"), pods)
    keys = state.value.value
    assert keys.shape == (2, 4)
    assert len(set(words(keys.reshape(-1)))) == WORKERS


def test_several_keys_of_a_worker():
    keys = jd.place(jd.PerWorker(jax.random.split(jax.random.key(0), 3)), 4).value
    assert keys.shape == (4, 3)
    assert len(set(words(keys.reshape(-1)))) == 12


def test_a_replicated_key_stays_as_it_is(mesh):
    key = jax.random.key(1)
    assert words(jd.place({"key": key}, mesh)["key"][None]) == words(key[None])


@pytest.mark.parametrize("rule", ["mean", "copy", "zero"])
@pytest.mark.parametrize("count", [2, 8, 11])
def test_new_workers_get_new_keys(rule, count):
    old = jd.place(jd.PerWorker(jax.random.key(0), resize=rule), 4)
    new = words(jd.resize(old, count).value)
    assert new[:4] == words(old.value)[:count]
    assert len(set(new)) == count


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_checkpoint_has_the_keys_that_resize_gives(tmp_path, count):
    state = jd.init_state(build, 8)
    checkpoint.save(tmp_path, state, step=1)
    found = checkpoint.restore(tmp_path, jd.init_state(build, count))
    assert words(key_of(found)) == words(key_of(jd.resize(state, count)))


def test_a_replicated_key_that_becomes_per_worker(tmp_path):
    key = jax.random.key(7)
    checkpoint.save(tmp_path, {"key": key}, step=1)
    like = jd.place({"key": jd.PerWorker(jax.random.key(0))}, 4)
    found = checkpoint.restore(tmp_path, like)["key"].value
    assert words(found) == words(jd.place(jd.PerWorker(key), 4).value)


def draw_mask(state, batch):
    """A dropout mask of each worker, and the mean over workers of all masks."""
    key = jax.random.fold_in(state["key"], state["count"])
    mask = jax.random.bernoulli(jd.runtime.worker_key(key), 0.5, batch.shape[1:]).astype(jnp.float32)
    new = {"key": state["key"], "count": state["count"] + 1, "masks": mask}
    return new, {"mean": jax.lax.pmean(mask, "data")}


def test_dropout_masks_differ_between_workers_and_steps(mesh):
    def masks():
        return {"key": jax.random.key(2), "count": jnp.int32(0), "masks": jd.PerWorker(jnp.zeros(64))}

    found = {}
    for name, run, state in (
        ("mesh", jd.distribute(draw_mask, mesh), jd.init_state(masks, mesh)),
        ("simulation", jd.simulate(draw_mask, WORKERS), jd.init_state(masks, WORKERS)),
    ):
        rows = []
        for _ in range(2):
            state, _ = run(state, jnp.zeros((WORKERS, 64)))
            rows += np.asarray(state["masks"].value).tolist()
        found[name] = rows
    assert found["mesh"] == found["simulation"]
    assert len({tuple(row) for row in found["mesh"]}) == 2 * WORKERS


def test_worker_key_over_two_axes():
    def step(state, batch):
        return jax.random.bits(jd.runtime.worker_key(jax.random.key(0), axis=("pod", "chip"))), {}

    sizes = {"pod": 2, "chip": 3}
    state = jd.place(jd.PerWorker(jnp.uint32(0)), sizes, axis=("pod", "chip"))
    drawn, _ = jd.simulate(step, sizes)(state, jnp.zeros(6))
    expected = [int(jax.random.bits(jax.random.fold_in(jax.random.key(0), i))) for i in range(6)]
    assert drawn.value.tolist() == expected


def test_worker_key_outside_a_step_is_refused():
    with pytest.raises(ValueError, match="axis 'data' is not bound here"):
        jd.runtime.worker_key(jax.random.key(0))
    assert words(jd.runtime.worker_key(jax.random.key(0), axis=None)[None]) == words(
        jax.random.fold_in(jax.random.key(0), 0)[None]
    )


def test_fold_keys_takes_arrays_of_keys():
    keys = jax.random.split(jax.random.key(0), (2, 3))
    folded = fold_keys({"keys": keys, "count": 1}, 7)
    expected = jnp.stack([jax.random.fold_in(key, 7) for key in keys.reshape(-1)])
    assert words(folded["keys"].reshape(-1)) == words(expected)
    assert folded["count"] == 1
