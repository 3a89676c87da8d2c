"""Training with parameters, gradients and optimizer state in host memory, three layers on the device at a time."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ..._core.checks import check_range
from ..._core.pinned import explain_pinned_limit
from ..._core.types import Array, AxisNames, PyTree
from ...reducers.exact import exact
from ...reducers.reducer import Reducer
from ...transforms.extra_args import with_extra_args
from ..host import with_master
from ..layers.stack import LayerStack, Programs, StepConfig, check_layer, configure, describe_part
from ..nvme.model import Model
from .step import HostStep, LayerState, hold
from .update import PartUpdate, check_optimizer, compile_update

EXACT = exact()


class HostLayersState(NamedTuple):
    """A model in host memory, each part with the optimizer's state for it: `layers` are in order."""

    embed: LayerState
    layers: tuple[LayerState, ...]
    head: LayerState


class HostLayers(NamedTuple):
    """Functions that train a model in host memory.

    Attributes:
      init: `init(layer, count, *, embed, head) -> state`. `layer(i)` returns the initial parameters of layer `i`; one
        layer is on the device at a time. `embed` and `head` are their parameters, `{}` for none.
      step: `step(state, batch, examples=None) -> (state, loss)`, one step of training. The state is donated: its arrays
        are deleted as new ones take their places, so that the host never holds the model twice, and a step that is
        interrupted after its first update leaves none. NumPy arrays are taken too. `examples` are the numbers of
        examples of the workers, by which their gradients and losses are weighted; if all are 0, the state stays and the
        loss is NaN.
      loss: `loss(state, batch, examples=None) -> loss`, the forward pass alone.
    """

    init: Callable[..., HostLayersState]
    step: Callable[..., tuple[HostLayersState, Array]]
    loss: Callable[..., Array]


def host_layers(
    stack: LayerStack,
    inner: optax.GradientTransformation,
    *,
    prefetch: int = 2,
    clip_norm: float | int | None = None,
    master_dtype: Any | None = None,
    mesh: Mesh | None = None,
    axis: AxisNames = "data",
    reducer: Reducer = EXACT,
) -> HostLayers:
    """Trains a stack of layers that is in host memory, of which three layers are on the device at a time.

    In both passes, the next two layers are sent while one is computed. The backward pass computes a layer again from
    its input, updates it on the device and sends it back.

    *Between host and device* in a step, for Adam in float32 and `n` parameters: `16n` bytes to the device and `12n`
    back; with `clip_norm` `24n` and `16n`.

    *On the device*: `prefetch + 1` layers with their optimizer state and one gradient (with `clip_norm` each with its
    gradient), and what one layer computes.

    *On the wire*, with a `mesh`: an all-reduce of each part's gradient. Every device is sent the whole layer.

    Args:
      stack: the model.
      inner: an optimizer that treats each parameter alone (Adam, Lion, Muon, LAMB, with schedules); it sees one part at
        a time, so masks and labels are functions.
      prefetch: the parts that are sent ahead of the computation.
      clip_norm: clips gradients by their norm over all parts.
      master_dtype: `jnp.float32` keeps and updates the parameters in it on the host; the device computes with their
        rounding to the dtype that `init` was given.
      mesh: its devices are the workers; `None`: one device.
      axis: the axes of the mesh over which the batch is split.
      reducer: averages gradients; one without state.

    Raises:
      ValueError: a negative `prefetch` or `clip_norm`; functions with other arguments; a reducer with residuals or
        random keys; several processes; from `init`, an optimizer that combines parameters, communicates or draws random
        numbers, layers that differ, more memory than XLA pins for a GPU; from `step`, before anything runs, a batch
        that cannot be split, a layer that changes the shape of `x`, a state that an earlier step has deleted.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jaxdist import offload
      >>> stack = offload.LayerStack(
      ...     embed=lambda p, batch: batch,
      ...     layer=lambda p, x: x @ p["w"],
      ...     head=lambda p, x, batch: jnp.mean(x),
      ... )
      >>> run = offload.host_layers(stack, optax.sgd(0.5))
      >>> state = run.init(lambda i: {"w": jnp.ones((1, 1))}, 3, embed={}, head={})
      >>> state, loss = run.step(state, jnp.ones((2, 1)))
      >>> w = state.layers[1].params["w"]
      >>> float(loss), w.tolist(), w.sharding.memory_kind
      (1.0, [[0.5]], 'pinned_host')

    References:
      Yuan, Sun, Sun, Ye, "MegaTrain: Full Precision Training of 100B+ Parameter Large Language Models on a Single GPU",
      arXiv:2604.05091, 2026, where the host's processor updates.
    """
    check_range("prefetch", prefetch, 0)
    if clip_norm is not None:
        check_range("clip_norm", clip_norm, 0, ends="(]")
    config = configure("host_layers", stack, reducer, mesh, axis)
    inner = inner if master_dtype is None else with_master(inner, master_dtype)
    update = compile_update(with_extra_args(inner), clip_norm, master_dtype)
    run = _HostLayers(config, config.build_programs(), with_extra_args(inner), update, prefetch, clip_norm is not None)
    return HostLayers(run.init, run.step, run.loss)


class _HostLayers(NamedTuple):
    config: StepConfig
    programs: Programs
    inner: optax.GradientTransformationExtraArgs
    update: PartUpdate
    prefetch: int
    clips: bool

    def init(self, layer: Callable[[int], PyTree], count: int, *, embed: PyTree, head: PyTree) -> HostLayersState:
        check_range("count", count, 1)
        first = layer(0)
        models = [describe_part(self.inner, tree) for tree in (embed, first, head)]
        for tree in (embed, first, head):
            check_optimizer(self.inner, tree)
        self._check_pinned_memory([models[0], *[models[1]] * count, models[2]])

        def start(tree: PyTree) -> LayerState:
            params = self.config.place_params(tree)
            # One part after the other, so that the device never has two.
            return jax.block_until_ready(LayerState(*hold((params, self.update.start(params)))))

        def start_layer(i: int) -> LayerState:
            leaves = check_layer(models[1], first if i == 0 else layer(i), i)
            return start(models[1].tree.unflatten(leaves))

        return HostLayersState(start(embed), tuple(map(start_layer, range(count))), start(head))

    def _check_pinned_memory(self, models: Sequence[Model]) -> None:
        """Raises if the host's memory for a GPU cannot hold these parts; with `clip_norm` gradients too."""
        devices = jax.devices() if self.config.mesh is None else list(self.config.mesh.devices.flat)
        nbytes = sum(_nbytes((model.held, model.state)) + self.clips * _nbytes(model.held) for model in models)
        advice = explain_pinned_limit(nbytes) if devices[0].platform == "gpu" else None
        if advice is not None:
            raise ValueError(f"the model takes {nbytes / 1e9:,.1f} GB of host memory, but {advice}")

    def step(self, state: HostLayersState, batch: PyTree, examples: Any = None) -> tuple[HostLayersState, Array]:
        counts = self.config.count_examples(examples)
        if counts is not None and not counts.any():
            return state, jnp.asarray(jnp.nan, jnp.float32)
        step = self._step(state, batch, counts, train=True)
        loss = step.run()
        embed, *layers, head = step.parts
        return HostLayersState(embed, tuple(layers), head), loss

    def loss(self, state: HostLayersState, batch: PyTree, examples: Any = None) -> Array:
        return self._step(state, batch, self.config.count_examples(examples), train=False).run()

    def _step(self, state: HostLayersState, batch: PyTree, examples: np.ndarray | None, *, train: bool) -> HostStep:
        parts = [state.embed, *state.layers, state.head]
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(parts)):
            raise ValueError(
                "a step has deleted arrays of this state: continue with the state that it returned, or from a "
                "checkpoint if it was interrupted"
            )
        return HostStep(
            self.config,
            self.programs,
            self.update,
            parts,
            batch,
            examples,
            ahead=self.prefetch,
            clips=self.clips,
            train=train,
        )


def _nbytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
