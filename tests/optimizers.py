"""The register of the optimizers that communicate inside: one line each, with the bytes that its docstring promises."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from laws import REDUCE, all_reduced, gathered, low_rank_floats

import jaxdist as jd
from jaxdist.transforms import demo


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
    return jd.dion(learning_rate, rank=2, axis=axis)


OPTIMIZERS = {
    # Six tiles of 4 by 4 with three values and three positions of 4 bits; the others in tiles of one entry.
    "demo": Optimizer(small_demo, ("axis",), gathered(6 * (3 * 2 + 2) + 6 * (2 + 1)), [("all-gather", "uint8")]),
    "dion": Optimizer(small_dion, ("axis",), all_reduced(4 * low_rank_floats(2)), [REDUCE] * 2),
}


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
