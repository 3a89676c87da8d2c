"""Runs a line of the register on the mesh and in simulation."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from register import CASES, SHAPES

import jaxdist as jd

PODS = {"pod": 2, "chip": 4}
STEPS = 3


class State(NamedTuple):
    params: Any
    opt: Any


def params():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradients(step, workers=8):
    """One gradient for each worker, unlike each other."""
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal((workers, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def linear_loss(params, batch):
    """Its gradient is the batch, bit for bit, on a mesh as in simulation."""
    return sum(jax.tree.leaves(jax.tree.map(lambda p, g: jnp.sum(p * g[0]), params, batch)))


def train_step(tx, axis):
    def step(state, batch):
        _, gradient = jd.local_value_and_grad(linear_loss, axis=axis)(state.params, batch)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), {}

    return step


def where(case):
    """Axis, workers and mesh of a case."""
    axis, workers = ("data", 8) if case.levels == 1 else (tuple(PODS), PODS)
    return axis, workers, jd.make_mesh({"data": 8} if case.levels == 1 else PODS)


class Ran(NamedTuple):
    """A case on the mesh and in simulation: states before and after each step, and both counts of its messages."""

    mesh: list[State]
    simulated: list[State]
    traces: int
    collectives: Any
    logical: Any


@functools.cache
def ran(name) -> Ran:
    case = CASES[name]
    axis, workers, mesh = where(case)
    tx = optax.chain(jd.all_reduce(case.make(), axis=axis), optax.sgd(0.5))
    traces = []

    def step(state, batch):
        traces.append(None)
        return train_step(tx, axis)(state, batch)

    def make_state():
        return State(params(), tx.init(params()))

    states = [jd.init_state(make_state, mesh, axis=axis)]
    # Both counts see one trace.
    traced = jd.distribute(step, mesh, axis=axis, donate=False).trace(states[0], gradients(0))
    compiled, logical = traced.lower().compile(), jd.analysis.logical_collectives(traced.jaxpr, platform="cpu")
    traces.clear()
    simulate = jd.simulate(step, workers, axis=axis)
    simulated = [jd.init_state(make_state, workers, axis=axis)]
    for number in range(STEPS):
        # A compiled program takes nothing but what it was compiled for: its own result must be that.
        states.append(compiled(states[-1], gradients(number))[0])
        simulated.append(simulate(simulated[-1], gradients(number))[0])
    return Ran(states, simulated, len(traces), jd.analysis.collectives(compiled), logical)
