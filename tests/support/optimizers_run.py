"""The optimizers that communicate inside: a register with the bytes that each docstring promises, how to run one."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from register import CODES, REDUCE, TOTAL, all_reduced, gathered, low_rank_floats, qsgd_bytes
from register_run import State, gradients, linear_loss, params

import jaxdist as jd
from jaxdist.optimizers import demo


class Optimizer(NamedTuple):
    """An optimizer and what it must send.

    Attributes:
      make: `make(learning_rate, axis=...)`.
      static: arguments that are not hyperparameters to be injected.
      bytes: `bytes(W)`, sent by one worker for `laws.SHAPES` on its most expensive step.
      wire: kind and dtype of every message of that step.
      cheapest: the bytes of its cheapest step, where steps differ.
      drifts: parameters differ between workers at times, and are marked.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    static: tuple[str, ...]
    bytes: Callable[[int], float]
    wire: list[tuple[str, str]]
    cheapest: Callable[[int], float] | None = None
    drifts: bool = False


def small_demo(learning_rate, *, axis="data"):
    return demo(learning_rate, chunk=4, k=3, axis=axis)


def small_dion(learning_rate, *, axis="data"):
    return jd.optimizers.dion(learning_rate, rank=2, axis=axis)


def early_one_bit_adam(learning_rate, *, axis="data"):
    return jd.optimizers.one_bit_adam(learning_rate, freeze_step=1, axis=axis)


def early_qadam(learning_rate, *, axis="data"):
    return jd.optimizers.qadam(learning_rate, warmup_steps=1, axis=axis)


def early_zero_one_adam(learning_rate, *, axis="data"):
    return jd.optimizers.zero_one_adam(learning_rate, freeze_step=2, refreshes=1, doubling_steps=1, axis=axis)


def two_shots(bytes_of_chunk):
    """Of one vector with all entries."""
    return lambda w: (w - 1) * 2 * bytes_of_chunk(8 * -(-TOTAL // (8 * w)))


OPTIMIZERS = {
    # Six tiles of 4 by 4 with three values and three positions of 4 bits; the others in tiles of one entry.
    "demo": Optimizer(small_demo, ("axis",), gathered(6 * (3 * 2 + 2) + 6 * (2 + 1)), [("all-gather", "uint8")]),
    "dion": Optimizer(small_dion, ("axis",), all_reduced(4 * low_rank_floats(2)), [REDUCE] * 2),
    "one_bit_adam": Optimizer(
        early_one_bit_adam, ("axis",), all_reduced(4 * TOTAL), [REDUCE], two_shots(CODES["scaled_sign"].bytes)
    ),
    "qadam": Optimizer(early_qadam, ("axis",), all_reduced(4 * TOTAL), [REDUCE], two_shots(qsgd_bytes(8, 512))),
    "zero_one_adam": Optimizer(
        early_zero_one_adam, ("axis",), all_reduced(4 * TOTAL), [REDUCE], lambda w: 0.0, drifts=True
    ),
}


def make_state(optimizer, tx):
    return lambda: State(jd.PerWorker(params()) if optimizer.drifts else params(), tx.init(params()))


def train_step(tx):
    def step(state, batch):
        _, gradient = jd.local_value_and_grad(linear_loss)(state.params, batch)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), {}

    return step


STEPS = 3


class Ran(NamedTuple):
    mesh: list[Any]
    simulated: list[Any]
    traces: int
    compiled: Any
    logical: Any


@functools.cache
def ran(name) -> Ran:
    """On the mesh and in simulation: states before and after each step."""
    optimizer, mesh = OPTIMIZERS[name], jd.make_mesh({"data": 8})
    tx = optimizer.make(0.1)
    traces = []

    def step(state, batch):
        traces.append(None)
        return train_step(tx)(state, batch)

    states = [jd.init_state(make_state(optimizer, tx), mesh)]
    run = jd.distribute(step, mesh, donate=False)
    compiled = run.lower(states[0], gradients(0)).compile()
    logical = jd.analysis.logical_collectives(run, states[0], gradients(0), platform="cpu")
    traces.clear()
    simulate = jd.simulate(step, 8)
    simulated = [jd.init_state(make_state(optimizer, tx), 8)]
    for number in range(STEPS):
        # A compiled program takes nothing but what it was compiled for: its own result must be that.
        states.append(compiled(states[-1], gradients(number))[0])
        simulated.append(simulate(simulated[-1], gradients(number))[0])
    return Ran(states, simulated, len(traces), compiled, logical)


def descend(tx, params, gradients, *, drifts=False):
    """Gradients `[steps, W, *s]` -> parameters and states after each step, simulated, as the caller places them."""
    rows = jax.tree.leaves(gradients)[0]

    def step(state, batch):
        updates, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    def make_state():
        return {"params": jd.PerWorker(params) if drifts else params, "opt": tx.init(params)}

    state, run = jd.init_state(make_state, rows.shape[1]), jd.simulate(step, rows.shape[1])
    states = []
    for number in range(rows.shape[0]):
        state, _ = run(state, jax.tree.map(lambda x, number=number: x[number], gradients))
        states.append(state)
    return [state["params"] for state in states], [state["opt"] for state in states]
