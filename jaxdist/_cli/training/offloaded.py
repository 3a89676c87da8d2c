"""The optimizer of a run: on the device, replicated or sharded, in host memory, or streamed from a disk."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._core.types import AxisNames, PyTree, State, Updates
from ...offload import Store, Streamed, host, nvme
from ...transforms.all_reduce import all_reduce
from ...zero.base import zero_redundancy
from ..models.base import TrainingMethod


class Offload(NamedTuple):
    """The place of the optimizer state: a folder on disk, or host memory if there is none."""

    folder: Path | None = None


class MeanGradients(NamedTuple):
    """Replaces the optimizer state inside the step: the mean gradients, and the state of the reducer."""

    means: Updates
    state: State


class SplitOptimizer(NamedTuple):
    """An optimizer as the part inside the compiled step and, with a disk, the part between two steps."""

    transformation: optax.GradientTransformationExtraArgs
    streamed: Streamed | None


def parse_offload(text: str | None) -> Offload | None:
    """Parses the value of `--offload`.

    Example:
      >>> from jaxdist._cli.training.offloaded import parse_offload
      >>> parse_offload("host"), parse_offload("nvme:/scratch/run").folder.name
      (Offload(folder=None), 'run')
    """
    if text is None or text == "host":
        return None if text is None else Offload()
    kind, _, folder = text.partition(":")
    if kind != "nvme" or not folder:
        raise ValueError(f"--offload must be host or nvme:FOLDER, got {text!r}")
    return Offload(Path(folder))


def split_optimizer(method: TrainingMethod, offload: Offload | None, *, axis: AxisNames) -> SplitOptimizer:
    """Makes the optimizer of a run, including the reducer before it.

    Args:
      method: how workers learn from each other.
      offload: the place of the optimizer state; None: on the device.
      axis: the mesh axis of the workers.

    Raises:
      ValueError: a state that is sharded while its parameters are not cannot be kept on disk.
    """
    if offload is not None and offload.folder is not None:
        if method.reducer is None or method.stage in (1, 2):
            raise ValueError(
                "--offload nvme needs a reducer, or --zero 3: it cannot shard the state of replicated parameters"
            )
        # The gradients of sharded parameters are means already.
        means = all_reduce(method.reducer, axis=axis) if method.stage == 0 else optax.identity()
        streamed = nvme(method.optimizer, Store(offload.folder), master_dtype=jnp.float32)
        return SplitOptimizer(_keep_means(means), streamed)
    transformation = optax.with_extra_args_support(method.optimizer)
    if method.stage:
        reducers = {} if method.stage == 3 else {"reducer": method.reducer}
        transformation = zero_redundancy(transformation, stage=2 if method.stage == 2 else 1, axis=axis, **reducers)
    elif method.reducer is not None:
        transformation = optax.chain(all_reduce(method.reducer, axis=axis), transformation)
    return SplitOptimizer(transformation if offload is None else host(transformation), None)


def _keep_means(means: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the mean gradients in the state, to be applied after the step."""

    def init_fn(params: PyTree) -> State:
        return MeanGradients(jax.tree.map(jnp.zeros_like, params), means.init(params))

    def update_fn(
        updates: Updates, state: State, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Updates, State]:
        del extra_args
        updates, inner = means.update(updates, state.state, params)
        return jax.tree.map(jnp.zeros_like, updates), MeanGradients(updates, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
