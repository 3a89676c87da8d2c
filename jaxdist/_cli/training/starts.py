"""A synchronous start that the local methods of a comparison share.

Local methods with an outer momentum need a model that is past its first, large steps. A run that averages gradients
is therefore trained once, and its parameters and the state of its optimizer after some steps are where each local
method begins. The recipes with `warmup_steps=` compute the same, up to rounding, in every run anew.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..._core.types import PyTree
from ...comm.base import add_bytes
from ...local_sgd.state import LocalStepsState, copy_wide
from ...state.marks import with_value
from ...state.placement import place
from .train import AXIS, Run, TrainState


class Start(NamedTuple):
    """A synchronous run after its first steps, on the host."""

    step: int  # the number of steps that it has taken
    params: PyTree  # the parameters, equal on all workers
    inner: PyTree  # the state of the optimizer, without that of the reducer
    wire_bytes: float  # bytes that one worker has sent


def take_start(run: Run, state: TrainState, step: int) -> Start:
    """Copies what a local method needs from the state of `exact` after `step` steps; the next step donates the state.

    Examples:
      >>> import jaxdist as jd, optax
      >>> from jaxdist._cli.models import digits
      >>> from jaxdist._cli.training import starts, train
      >>> mesh = jd.make_mesh({"data": 1})
      >>> run = train.prepare(digits.digits_workload(4), jd.exact(), optax.adam(1e-3), mesh=mesh, batch_size=8)
      >>> (record, state), = train.steps(run, 1)
      >>> starts.take_start(run, state, 1).step
      1
    """
    # `prepare` chains the reducer and the optimizer.
    _, inner = state.opt_state
    return Start(step, jax.device_get(state.params), jax.device_get(inner), run.bytes_sent(state, step))


def begin_at(run: Run, start: Start, *, sync_period: int, seed: int) -> Run:
    """Returns the run of a method around `local_steps` that continues from `start` with rounds of `sync_period`.

    Its first round begins there, with an empty outer momentum and no residual. The optimizer of every worker has the
    state of the start, so that schedules go on counting, and the bytes of the start count.

    Raises:
      ValueError: the method is not one around `local_steps` with the optimizer of the start inside.
    """
    first = run.program.worker.make_state(seed)
    local = first.opt_state
    if not isinstance(local, LocalStepsState):
        raise ValueError(f"a start is for methods around local_steps, and the state is {type(local).__name__}")
    values, structure = jax.tree.flatten(local.inner)
    given = jax.tree.leaves(start.inner)
    if [value.shape for value in values] != [leaf.shape for leaf in given]:
        raise ValueError("a start is for methods whose inner optimizer is the one of the synchronous run")
    local = local._replace(
        count=jnp.asarray(start.step, local.count.dtype),
        sent=add_bytes(local.sent, start.wire_bytes),
        anchor=copy_wide(start.params),
        inner=jax.tree.unflatten(structure, given),
    )
    state = TrainState(with_value(first.params, start.params), local)
    placed = place(state, run.program.mesh, axis=AXIS)
    return run._replace(state=placed, seed=seed, sync_period=sync_period, first=start.step)
