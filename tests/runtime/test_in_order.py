"""Between CPU processes no collective is free to start beside those of a loop or branch before it."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from problems import TrainState, make_step

import jaxdist as jd
from jaxdist.analysis import hlo_reader

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
WORKERS, STEPS = 4, 4


@pytest.fixture(scope="module")
def mesh():
    return jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])


def between_processes(monkeypatch):
    monkeypatch.setattr(importlib.import_module("jaxdist.runtime.distribute"), "mixes_collectives", lambda: True)


def unordered(program):
    """The collectives that a compiled program may start while those of a loop or branch before them run."""
    module, found = hlo_reader.parse(program.as_text()), []

    def communicates(instruction):
        inside = hlo_reader.callees_of(
            instruction, "body", "condition", "to_apply", "branch_computations", "true_computation", "false_computation"
        )
        return instruction.opcode.removesuffix("-start") in COLLECTIVES or any(
            any(map(communicates, module.computations[name].instructions.values())) for name in inside
        )

    for computation in module.computations.values():
        depends: dict[str, set[str]] = {}
        nested: list[str] = []
        # In the order of the compiler's schedule.
        for name, x in computation.instructions.items():
            depends[name] = set().union(*(depends.get(operand, set()) | {operand} for operand in x.operands))
            if communicates(x):
                found += [(before, name) for before in nested if before not in depends[name]]
                nested += [name] if x.opcode in ("while", "conditional") else []
    return found


def start():
    return {name: jnp.ones((8, 8)) * scale for name, scale in (("a", 0.1), ("b", 0.2))}


def loss(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["a"]) @ params["b"] - 1))


def trained(tx, loss=loss):
    return make_step(tx, grad=jd.local_value_and_grad(loss))


def branches_of(axis="data"):
    """Two branches, of which one holds a loop, and collectives before, between and behind them."""

    def communicate(x):
        return lax.scan(lambda x, _: (lax.cond(x.sum() > 0, halve, lambda x: x, x), None), x, None, length=2)[0]

    def halve(x):
        return lax.pmean(x, axis) / 2

    def step(state, batch):
        first = lax.pmean(batch.mean(), axis)
        agreed = state.opt % 2 == 0
        x = lax.cond(agreed, communicate, lambda x: x, state.params)
        second = lax.psum(batch[:2], axis)
        y = lax.cond(agreed, lambda x: lax.pmax(x, axis), lambda x: x, 2 * state.params)
        z = lax.while_loop(lambda z: z.sum() < 50, lambda z: z + lax.pmean(abs(z), axis), state.params)
        return TrainState(x + y.mean() + z, state.opt + 1), {"others": (first, second, lax.pmax(batch.max(), axis))}

    return step


def of_loops(params, batch):
    layers = [params["a"], params["b"]]
    x = jd.zero.gathered_scan(
        lambda w, x: jnp.tanh(x @ w), layers, jd.zero.gathered(lambda w, x: x @ w)(layers[0], batch)
    )
    return jnp.mean(jnp.square(jd.zero.gathered(lambda w, x: jnp.tanh(x @ w))(layers[1], x) - 1))


def make_branches():
    return branches_of(), TrainState(jnp.ones((8, 8)), jnp.int32(0))


def make_streaming():
    tx = jd.local_sgd.streaming_diloco(optax.adam(0.1), sync_period=2, fragments=2)
    return trained(tx), TrainState(jd.PerWorker(start()), tx.init(start()))


def make_accordion():
    regime = jd.reducers.accordion(jd.power_sgd(2), jd.power_sgd(1), epoch_steps=1, interval_steps=1)
    tx = optax.chain(jd.all_reduce(jd.error_feedback(regime)), optax.sgd(0.1))
    return trained(tx), TrainState(start(), tx.init(start()))


def make_loops():
    sharded, tx = jd.zero.shard(start(), smallest=0), jd.zero_redundancy(optax.adam(0.1))
    return trained(tx, of_loops), TrainState(sharded, tx.init(sharded))


@pytest.mark.parametrize(
    "make",
    [
        make_branches,
        pytest.param(make_streaming, marks=pytest.mark.slow),
        pytest.param(make_accordion, marks=pytest.mark.slow),
        make_loops,
    ],
)
def test_collectives_behind_a_loop_or_branch_wait_for_it(monkeypatch, mesh, make):
    """In the compiled program, with the bits, the types and the collectives of the step as it was written."""
    step, state = make()
    batch = np.random.default_rng(0).normal(size=(WORKERS * 2, 8)).astype(np.float32)
    ends, programs = [], []
    for _ in range(2):
        placed, run = jd.place(state, mesh), jd.distribute(step, mesh)
        programs.append(run.lower(placed, batch).compile())
        for _ in range(STEPS):
            placed, metrics = run(placed, batch)
        ends.append((placed, metrics))
        between_processes(monkeypatch)
    assert unordered(programs[0])
    assert unordered(programs[1]) == []
    assert jax.tree.structure(ends[0]) == jax.tree.structure(ends[1])
    for before, after in zip(*map(jax.tree.leaves, ends), strict=True):
        assert jax.typeof(before) == jax.typeof(after)
        np.testing.assert_array_equal(before, after)
    plain, ordered = (jd.analysis.collectives(program) for program in programs)
    assert plain.wire_bytes == ordered.wire_bytes


def test_a_step_without_loops_and_branches_is_what_it_was(monkeypatch, mesh):
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.adam(0.1))
    state, batch = jd.place(TrainState(start(), tx.init(start())), mesh), np.ones((WORKERS, 8), np.float32)
    texts = []
    for _ in range(2):
        texts.append(jd.distribute(trained(tx), mesh).lower(state, batch).compile().as_text())
        between_processes(monkeypatch)
    counts = [hlo_reader.opcodes(text) for text in texts]
    assert counts[0] == counts[1]
