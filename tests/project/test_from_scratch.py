"""The methods that `examples/from_scratch` writes out in plain JAX take the steps of the library, to rounding."""

import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import REPOSITORY

import jaxdist as jd
from jaxdist.local_sgd import global_params
from jaxdist.reducers.power_sgd import PowerSGDState

FOLDER = REPOSITORY / "examples/from_scratch"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
STEPS = 6


@pytest.fixture(autouse=True)
def broadcasting():
    """As users have it: biases are added to rows."""
    with jax.numpy_rank_promotion("allow"):
        yield


def load(name):
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def run(step, state, inputs):
    """The states after each step of a function of one worker, with all inputs given at once."""
    run = jax.jit(jax.vmap(step, axis_name="workers"))
    states = []
    for given in inputs:
        state = run(state, *given)
        states.append(state)
    return states


def run_library(tx, params, loss_fn, batches, *, per_worker=False, rate=None, prepare=lambda state: state):
    """The parameters and optimizer states after each step, from the gradients of the same loss on the same batches.

    `batches` have a leading axis of workers; `prepare` changes the first state of the optimizer.
    """

    def step(state, batch):
        params, opt_state, count = state
        # An extra argument of the reducer, whose `rate` is that of the step.
        extras = {} if rate is None else {"learning_rate": rate(count)}
        batch = jax.tree.map(lambda x: x[0], batch)
        _, grads = jd.local_value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **extras)
        return (optax.apply_updates(params, updates), opt_state, count + 1), {}

    workers = jax.tree.leaves(batches[0])[0].shape[0]
    marked = jd.PerWorker(params) if per_worker else params
    state = jd.place((marked, prepare(tx.init(params)), jnp.zeros((), jnp.int32)), workers)
    run = jax.jit(jd.simulate(step, workers=workers))
    found = []
    for batch in batches:
        state, _ = run(state, batch)
        found.append((state[0].value if per_worker else state[0], state[1]))
    return found


def first_worker(tree):
    return jax.tree.map(lambda x: x[0], tree)


def assert_same(found, expected):
    """Equal to rounding, of numbers as large as the largest of an array; and not because nothing happens."""
    for ours, theirs in zip(found, expected, strict=True):
        for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())
    for first, last in zip(*map(jax.tree.leaves, (found[0], found[-1])), strict=True):
        assert np.abs(last - first).max() > 0.01 * np.abs(last).max()


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_does_without_the_library(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert 60 <= text.count("\n") <= 100
    assert not re.search(r"^\s*(import|from) jaxdist", text, re.MULTILINE)
    document = text.split('"""')[1]
    assert f"python examples/from_scratch/{name}.py" in document
    assert "arXiv:" in document
    assert re.search(r"this file and the library.* differ:\n\n- ", document)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_linked(name):
    """From the module of its method, and from the page of it or of its family."""
    modules = [path.read_text() for path in (REPOSITORY / "jaxdist").rglob("*.py")]
    pages = [path.read_text() for path in (REPOSITORY / "docs").rglob("*.md")]
    assert any(f"`examples/from_scratch/{name}.py`" in text for text in modules)
    assert f"| [`{name}.py`](../examples/from_scratch/{name}.py) |" in (REPOSITORY / "docs/examples.md").read_text()
    link = f"](../../examples/from_scratch/{name}.py)"
    assert any(link in text and "examples.md#from-scratch" in text for text in pages)


def test_power_sgd():
    file = load("power_sgd")
    batches = [file.batch_at(step) for step in range(STEPS)]
    states = run(file.train_step, file.init(), [(batch,) for batch in batches])
    reducer = jd.error_feedback(jd.power_sgd(rank=file.RANK, min_compression_rate=0))
    tx = optax.chain(jd.all_reduce(reducer), optax.sgd(file.RATE, momentum=file.MOMENTUM))

    def with_the_same_q(state):
        is_power = lambda x: isinstance(x, PowerSGDState)  # noqa: E731
        q = {"bias": jnp.zeros(()), "matrix": file.init().q[0]}
        return jax.tree.map(lambda x: x._replace(q=q) if is_power(x) else x, state, is_leaf=is_power)

    params = first_worker(file.init().params)
    library = run_library(tx, params, file.loss_fn, batches, prepare=with_the_same_q)
    assert_same([first_worker(state.params) for state in states], [params for params, _ in library])
    residuals = [state[0].reducer.residual.value["matrix"] for _, state in library]
    assert_same([state.error for state in states], residuals)


def test_two_shot_quantization():
    file = load("two_shot_quantization")
    batches = [file.batch_at(step) for step in range(STEPS)]
    steps = [jnp.full(file.WORKERS, step) for step in range(STEPS)]
    found = run(file.train_step, jnp.zeros((file.WORKERS, 16, 16)), zip(batches, steps, strict=True))
    # The same draws: of the same keys, by the same generator.
    code = jd.qsgd(4, bucket=file.BUCKET, noise=jax.random.uniform)
    tx = optax.chain(jd.all_reduce(jd.two_shot(code)), optax.sgd(file.RATE))
    library = run_library(tx, jnp.zeros((16, 16)), file.loss_fn, batches)
    assert_same([params[0] for params in found], [params for params, _ in library])


def test_top_k():
    file = load("top_k")
    batches = [file.batch_at(step) for step in range(STEPS)]
    states = run(file.train_step, file.init(), [(batch,) for batch in batches])
    reducer = jd.error_feedback(jd.compressed(jd.top_k(file.KEPT / file.SIZE)), with_learning_rate=True)
    tx = optax.chain(jd.all_reduce(reducer), optax.scale_by_learning_rate(file.rate))
    library = run_library(tx, jnp.zeros(file.SIZE), file.loss_fn, batches, rate=file.rate)
    assert_same([state.x[0] for state in states], [params for params, _ in library])
    assert_same([state.memory for state in states], [state[0].reducer.residual.value for _, state in library])


def test_diloco():
    file = load("diloco")
    rounds, steps = 3, 3
    batches = [jax.tree.map(lambda x: x[:, :steps], file.batches_of(number)) for number in range(rounds)]
    states = run(lambda state, batches: file.diloco_round(state, batches)[0], file.init(), [(x,) for x in batches])
    tx = jd.local_sgd.diloco(file.INNER, sync_period=steps, learning_rate=0.7, momentum=0.9)
    params = first_worker(file.init().theta)
    each = [jax.tree.map(lambda x, i=i: x[:, i], batch) for batch in batches for i in range(steps)]
    library = run_library(tx, params, file.loss_fn, each, per_worker=True)
    anchors = [global_params(state) for _, state in library[steps - 1 :: steps]]
    assert_same([first_worker(state.theta) for state in states], anchors)


def test_streaming_diloco():
    file = load("streaming_diloco")
    steps = file.PERIOD + file.PERIOD // 2 + file.DELAY  # two rounds of one fragment, and one of the other
    batches = [file.batch_at(t) for t in range(1, steps + 1)]
    found = list(file.train(steps, lambda t: batches[t - 1]))
    tx = jd.local_sgd.streaming_diloco(
        file.INNER,
        sync_period=file.PERIOD,
        fragments=jd.local_sgd.strided(file.FRAGMENTS),
        delay=file.DELAY,
        merge_alpha=file.ALPHA,
        reducer=jd.compressed(jd.compressors.e3m0()),
    )
    params = list(jax.random.normal(jax.random.key(0), (file.LAYERS, 8, 8)) / 6)
    library = run_library(tx, params, file.loss_fn, batches, per_worker=True)
    assert_same(found, [params for params, _ in library])


@pytest.mark.parametrize("name", ["d_psgd", "choco"])
def test_gossip(name):
    file = load("gossip")
    batches = [file.batch_at(step) for step in range(STEPS)]
    zeros, copies = jnp.zeros((file.WORKERS, file.SIZE)), jnp.zeros((file.WORKERS, 3, file.SIZE))
    first = zeros if name == "d_psgd" else file.ChocoState(zeros, copies)
    states = run(getattr(file, f"{name}_step"), first, [(batch,) for batch in batches])
    methods = {
        "d_psgd": jd.decentralized.d_psgd(order="combine_then_adapt"),
        "choco": jd.decentralized.choco(jd.top_k(file.KEPT / file.SIZE), step_size=file.GAMMA),
    }
    tx = jd.gossip(optax.sgd(file.RATE), jd.topology.ring(file.WORKERS), method=methods[name])
    library = run_library(tx, jnp.zeros(file.SIZE), file.loss_fn, batches, per_worker=True)
    assert_same([state if name == "d_psgd" else state.x for state in states], [params for params, _ in library])


def test_zero():
    file = load("zero")
    batches = [file.batch_at(step) for step in range(STEPS)]
    states = run(lambda state, batch: file.train_step(*state, batch)[:2], file.init(), [(x,) for x in batches])
    tx = jd.zero_redundancy(optax.adam(file.RATE))
    library = run_library(tx, first_worker(file.init()[0]), file.loss_fn, batches)
    assert_same([first_worker(params) for params, _ in states], [params for params, _ in library])


def test_islands(tmp_path):
    """Two islands of each in threads; then one of the file's that comes too late follows to the same bits."""
    file, rounds = load("islands"), 3
    tx = jd.local_steps(file.INNER, file.OUTER, sync_period=file.PERIOD, axis=None)

    @jax.jit
    def step(state, key):
        theta, opt = state
        updates, opt = tx.update(jax.grad(file.loss_fn)(theta, key), opt, theta, sync=())
        return theta + updates, opt

    def train(name):
        state, anchors = (jnp.zeros(file.SIZE), tx.init(jnp.zeros(file.SIZE))), []
        options = {"name": name, "begin_with": 2, "round_timeout": 60, "patience": 120}
        with jd.islands.join(tmp_path / "library", tx, **options) as island:
            state = island.enter(state)
            for number in range(rounds * file.PERIOD):
                state = step(state, jax.random.fold_in(jax.random.key(ord(name)), number))
                if island.due(number):
                    state, report = island.meet(state)
                    anchors.append((list(report.members), global_params(state[1])))
        return anchors

    folder = tmp_path / "file"
    folder.mkdir()

    def train_file(name):
        return list(file.train(folder, name, {"a", "b"}, rounds))

    file.train.__globals__["TIMEOUT"] = 60
    with ThreadPoolExecutor() as pool:
        library, found = (list(pool.map(function, "ab")) for function in (train, train_file))
    for ours, theirs in zip(found, library, strict=True):
        assert [members for members, _ in ours] == [members for members, _ in theirs] == [["a", "b"]] * rounds
        assert_same([anchor for _, anchor in ours], [anchor for _, anchor in theirs])
    late = train_file("c")
    assert [anchor.tolist() for _, anchor in late] == [anchor.tolist() for _, anchor in found[0]]
