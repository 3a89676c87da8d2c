"""Every method's state, saved by eight workers, for 4, 2, 1 and 16: each leaf by the rule of its marks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers_run import OPTIMIZERS
from register import CASES
from register_run import params, where

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist._core.trees import is_key
from jaxdist.checkpoint import _manifest
from jaxdist.state import cutting_marks

TOP_K = jd.error_feedback(jd.compressed(jd.top_k(0.25)))
RING = jd.topology.ring(8)
# With parameters of each worker; the methods that agree on them are in the registers.
LOCAL = {
    "slowmo": jd.local_sgd.slowmo(optax.sgd(0.1, momentum=0.9), sync_period=4, learning_rate=0.1, momentum=0.6),
    "diloco": jd.local_sgd.diloco(optax.adam(0.1), sync_period=4, reducer=TOP_K),
    "streaming_diloco": jd.local_sgd.streaming_diloco(optax.adam(0.1), sync_period=4, fragments=2),
    "d_psgd": jd.gossip(optax.adam(0.1), RING),
    "choco": jd.gossip(optax.adam(0.1), RING, method=jd.decentralized.choco(jd.top_k(0.5), step_size=0.3)),
    "gradient_tracking": jd.gossip(optax.sgd(0.1), RING, method=jd.decentralized.gradient_tracking()),
}
CUT = {
    "zero_1": jd.zero_redundancy(optax.adam(0.1)),
    "zero_2": jd.zero_redundancy(optax.adam(0.1), stage=2, reducer=jd.two_shot(jd.qsgd(4))),
}


def everything():
    """The states of one axis and of two, as one worker means them."""
    one, two = {}, {}
    for name, case in CASES.items():
        tx = jd.all_reduce(case.make(), axis=where(case)[0])
        (one if case.levels == 1 else two)[name] = {"params": params(), "opt": tx.init(params())}
    for name, tx in (LOCAL | CUT | {name: one.make(0.1) for name, one in OPTIMIZERS.items()}).items():
        one[name] = {"params": jd.PerWorker(params()) if name in LOCAL else params(), "opt": tx.init(params())}
    return one, two


@pytest.fixture(scope="module")
def placed():
    """The shapes of all states for so many workers, in two pods if they are even."""
    written = jax.eval_shape(everything)

    def of(workers):
        pods = math.gcd(2, workers)
        axes = {"pod": pods, "chip": workers // pods}

        def make(one, two):
            return {"one": jd.place(one, workers), "two": jd.place(two, axes, axis=("pod", "chip"))}

        return jax.eval_shape(make, *written)

    return of


def filled(shapes):
    """Random numbers everywhere; nothing is compiled for them."""
    rng = np.random.default_rng(0)

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*x.shape, 2), np.uint32)))
        return jnp.asarray((rng.standard_normal(x.shape) * 100).astype(x.dtype))

    return jax.tree.map(one, shapes)


@pytest.fixture(scope="module")
def eight(placed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    checkpoint.save(folder, filled(placed(8)), 3)
    return folder, checkpoint.load(folder).state


def whole(marks, x):
    """The mean over workers in float64, or worker 0's integers; what is cut in one piece."""
    for mark in cutting_marks(marks):
        if isinstance(mark, jd.Sharded):
            x = x[: math.prod(mark.shape)]
        else:
            x = x.mean(0, dtype=np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
    return x


@pytest.mark.parametrize("workers", [2, *(pytest.param(other, marks=pytest.mark.slow) for other in (16, 4, 1))])
def test_each_leaf_follows_its_marks(eight, placed, workers):
    folder, saved = eight
    like = placed(workers)
    state = checkpoint.restore(folder, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [(x.shape, x.dtype) for x in jax.tree.leaves(like)]
    seen = {"agreed": 0, "cut": 0, "mean": 0, "copy": 0}
    for name, (marks, leaf) in _manifest.name_leaves(state).items():
        new = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        old = jax.tree.leaves(saved[name])[0]
        kinds = [mark for mark in cutting_marks(marks) if isinstance(mark, jd.PerWorker)]
        if not kinds:
            seen["cut" if cutting_marks(marks) else "agreed"] += 1
            np.testing.assert_array_equal(whole(marks, new), whole(marks, old), err_msg=name)
        elif kinds[0].resize == "mean" and jnp.issubdtype(new.dtype, jnp.floating):
            seen["mean"] += 1
            wanted, found = (whole(marks, x).astype(new.dtype) for x in (old, new))
            np.testing.assert_array_max_ulp(found, wanted, maxulp=1)
            if len(new) != len(old):  # the pods of two levels may be as many as before
                np.testing.assert_array_equal(new, np.broadcast_to(new[:1], new.shape), err_msg=name)
        elif kinds[0].resize == "zero":
            assert not new.any(), name
        else:
            seen["copy"] += 1
            np.testing.assert_array_equal(new[: len(old)], old[: len(new)], err_msg=name)
    assert min(seen.values()) >= 3, seen


def of_each_worker():
    """What workers may not average: codes with their scales, and fp8 statistics of flax."""
    code = jd.compressors.fp8(block=32, rounding="stochastic")
    tx = jd.transforms.quantized_state(optax.sgd(0.1, momentum=0.9), code, smallest=1)
    return {"opt": tx.init(jnp.ones((4, 32))), "fp8": {"_overwrite_with_gradient": {"amax": jnp.zeros(2)}}}


def test_codes_stay_with_their_scales_and_statistics_are_maxima(tmp_path):
    """As in `resize` and `consensus`, for other numbers of workers and for a state without the mark."""

    def fill(x):
        rows = jnp.arange(1, 5).reshape(4, *[1] * (x.ndim - 1))
        return x + rows.astype(x.dtype) if x.dtype != jnp.uint8 else x ^ rows.astype(x.dtype)

    made = jax.jit(of_each_worker)()
    state = jax.tree.map(fill, jd.place(jd.PerWorker(made), 4))
    checkpoint.save(tmp_path, state, 1)
    wanted = jax.tree.map(lambda x: x[0], state.value) | {"fp8": {"_overwrite_with_gradient": {"amax": jnp.full(2, 4)}}}
    one = checkpoint.restore(tmp_path, jd.place(made, 1))
    two = checkpoint.restore(tmp_path, jd.place(jd.PerWorker(made), 2))
    for found in (one, jax.tree.map(lambda x: x[0], two.value), jd.consensus(state)):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    jax.tree.map(np.testing.assert_array_equal, two, jd.resize(state, 2))


UNEVEN = {
    "sgp": (jd.topology.digraph(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]), jd.decentralized.sgp()),
    "osgp": (jd.topology.one_peer_exponential(4), jd.decentralized.osgp()),
    "relay_sgd": (jd.topology.path(4), jd.decentralized.relay_sgd()),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_other_workers_are_warned_of_models_that_do_not_count_alike(name, tmp_path):
    """Their mean over workers is another model; as the page says, the method begins anew from `mean_params`."""
    graph, method = UNEVEN[name]
    tx = jd.gossip(optax.sgd(0.1), graph, method=method)

    def begin(workers):
        start = jnp.zeros(3)
        return jd.place({"params": jd.PerWorker(start), "opt": tx.init(start)}, workers)

    four = begin(4)
    checkpoint.save(tmp_path, four, 1)
    cure = r"leaf `opt\.method\.\w+.*` is for 4 workers .* 2 workers .* take decentralized\.mean_params\(params"
    for change in (lambda: jd.resize(four, 2), lambda: checkpoint.restore(tmp_path, begin(2))):
        with pytest.warns(UserWarning, match=cure):
            assert change()["params"].value.shape == (2, 3)
    # Without a change there is no warning.
    restored = checkpoint.restore(tmp_path, begin(4))
    assert jd.decentralized.mean_params(restored["params"], restored["opt"]).tolist() == [0.0] * 3
    assert jd.resize(four, 4)["params"].value.shape == (4, 3)
