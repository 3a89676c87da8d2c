"""Where the optimizer of a run works: on the device, whole or cut, on the host, or beside its state on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ... import offload
from ..._core.types import State, Updates
from ...transforms.all_reduce import all_reduce
from ...zero.base import zero_redundancy
from ..models.base import Method


class Offload(NamedTuple):
    """Where the optimizer's state lies: in this folder, or, without one, in the host's memory."""

    folder: Path | None = None


class Gradients(NamedTuple):
    """In place of an optimizer's state: the mean gradients of this step, and the state of what averaged them."""

    means: Updates
    state: State


class Optimizer(NamedTuple):
    """The part of it inside the compiled step, and, where it is not all of it, the part between two steps."""

    transformation: optax.GradientTransformationExtraArgs
    streamed: offload.Streamed | None


def parse_offload(text: str | None) -> Offload | None:
    """Makes what `--offload` spells.

    Example:
      >>> from jaxdist._cli.training.offloaded import parse_offload
      >>> parse_offload("host"), parse_offload("nvme:/scratch/run").folder.name
      (Offload(folder=None), 'run')
    """
    if text is None or text == "host":
        return None if text is None else Offload()
    kind, _, folder = text.partition(":")
    if kind != "nvme" or not folder:
        raise ValueError(f"--offload is host or nvme:FOLDER, got {text!r}")
    return Offload(Path(folder))


def arrange(method: Method, where: Offload | None, *, axis: str) -> Optimizer:
    """The optimizer of a run, the reducer before it included.

    Args:
      method: how workers learn from each other.
      where: what `parse_offload` made.
      axis: that of the workers.

    Raises:
      ValueError: only a whole state, or that of cut parameters, can lie on disk.
    """
    if where is not None and where.folder is not None:
        if method.reducer is None or method.stage in (1, 2):
            raise ValueError(
                "--offload nvme needs a reducer, or --zero 3: a whole state, or parts that lie with their parameters"
            )
        # The gradients of parameters that are cut are means already.
        means = all_reduce(method.reducer, axis=axis) if method.stage == 0 else optax.identity()
        store = offload.Store(where.folder)
        return Optimizer(_kept(means), offload.nvme(method.optimizer, store, master_dtype=jnp.float32))
    transformation = optax.with_extra_args_support(method.optimizer)
    if method.stage:
        reducers = {} if method.stage == 3 else {"reducer": method.reducer}
        transformation = zero_redundancy(transformation, stage=2 if method.stage == 2 else 1, axis=axis, **reducers)
    elif method.reducer is not None:
        transformation = optax.chain(all_reduce(method.reducer, axis=axis), transformation)
    return Optimizer(transformation if where is None else offload.host(transformation), None)


def _kept(means: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the mean gradients in the state, for who applies them after the step."""

    def init(params) -> State:
        return Gradients(jax.tree.map(jnp.zeros_like, params), means.init(params))

    def update(updates, state, params=None, **_) -> tuple[Updates, State]:
        updates, new = means.update(updates, state.state, params)
        return jax.tree.map(jnp.zeros_like, updates), Gradients(updates, new)

    return optax.GradientTransformationExtraArgs(init, update)


def around(step: Callable[..., Any], streamed: offload.Streamed | None) -> Callable[..., Any]:
    """`step(state, batch)`, and after it the update of the parameters on the host."""
    if streamed is None:
        return step

    def both(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = step(state, batch)
        return state._replace(params=streamed.apply(state.params, state.opt_state.means)), metrics

    return both
