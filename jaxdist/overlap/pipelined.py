"""Gradients of the first layers, reduced at the start of the next step, each just before its layer's forward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.trees import fold_keys, tree_where
from .._core.types import Array, AxisNames, Bool, PyTree, State
from ..comm.over import over
from ..reducers.base import Law, Reducer
from ..reducers.exact import exact
from ..schedule.forward_order import LayerSplit, split_layers
from ..state.marks import PerWorker, bind
from ..transforms.local_gradients import check_leaves, check_local, refuse_model_axes
from ..transforms.local_value_and_grad import local_value_and_grad
from ..wire.encoded import after
from ..wire.flat import fuse
from .layer_updates import Ownership, find_owners, keep_shared, update_layers


class PipelinedState(NamedTuple):
    """The state of pipelined training: `params` lack the update of the first layers while `pending`.

    Attributes:
      params: the parameters (replicated). Evaluate and export them only after `flush`.
      opt_state: of the optimizer (replicated); each layer's part is as old as its parameters.
      reducers: the reducer's state of each layer, in forward order.
      carried: the gradients of the first layers that are not reduced yet (per-worker).
      pending: whether there are any (replicated).
    """

    params: PyTree
    opt_state: State
    reducers: tuple[State, ...]
    carried: tuple[PyTree, ...]
    pending: Bool[Array, ""]


class Pipelined(NamedTuple):
    """The functions of `pipelined`.

    Attributes:
      init: `init(params) -> PipelinedState`.
      step: `step(state, batch, *rest) -> (state, loss)` as one worker sees it, for `distribute` and `simulate`. The
        loss is the mean over workers; with `has_aux` a pair: that, and the mean of the auxiliary arrays.
      flush: `flush(state, batch=None) -> (state, ())`: reduces and applies pending gradients. It is a step too:
        `jd.distribute(pipeline.flush, mesh)(state, None)`.
    """

    init: Callable[[PyTree], PipelinedState]
    step: Callable[..., tuple[PipelinedState, Any]]
    flush: Callable[..., tuple[PipelinedState, Any]]


def pipelined(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    defer: int,
    layers: Sequence[Any] | None = None,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
    has_aux: bool = False,
) -> Pipelined:
    """Synchronous training that overlaps communication with the next forward pass too, across the border of steps.

    The backward pass ends with the first layers, so in an ordinary step nothing is left to hide their reduction behind.
    Here the gradients `g_i` of the first `defer` layers wait, unreduced, for the next call. It reduces and applies them
    in forward order, one collective a layer, `p_i <- p_i + tx(mean(g_i))`, and the forward pass of layer `i` needs only
    those up to `i`: the reduction of the others runs beside it. The later layers are reduced inside the step, beside
    the backward pass, in its order. Nothing is stale: the iterates are those of synchronous training, except that those
    of the first layers are complete one call later, or after `flush`.

    *On the wire*: per step the bytes of the reducer for each layer separately, `L` times its collectives, and a mean of
    4 bytes for the loss. The first call reduces zeros.

    *State* (`PipelinedState`): the reducer's for each layer; one worker's gradients of the first `defer` layers. When
    the number of workers changes, each new worker gets the mean of the old gradients, which leaves the iterates as they
    would have been.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`, as for `local_value_and_grad`. Layers that it runs in one
        `lax.scan` are one layer here.
      tx: an optimizer of optax that treats each layer separately: Adam, Lion, LAMB, clipping by entry or block. No
        clipping by the global norm, and no `all_reduce`: use `reducer`.
      defer: the number of layers that wait; 0 is an ordinary step with a collective for each layer. More hides more
        behind the forward pass, and less behind backward; it takes the memory of their gradients. Start at half of the
        layers.
      layers: the top-level entries of the parameters in forward order, tuples of entries where several make up a layer
        (a collective for every bias costs its latency). `jd.schedule.forward_order` reads it from a loss. `None`: the
        order of a sequence.
      reducer: `exact()` by default; with `error_feedback` each layer has its residual.
      axis: the mesh axis of the workers.
      has_aux: whether the loss returns `(scalar, aux)`.

    Returns:
      `Pipelined(init, step, flush)`.

    Raises:
      ValueError: `defer` is negative, or larger than the number of layers; `layers` is missing for a dict or does not
        name each entry once; the optimizer's update of one layer depends on another layer's gradient (global norms,
        `apply_if_finite`, `MultiSteps`), or its state communicates. All before the first collective.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> def loss(params, x):
      ...     return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - 1.0) ** 2)
      >>> pipeline = jd.overlap.pipelined(loss, optax.adam(0.1), defer=1)
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state = jd.init_state(lambda: pipeline.init([jnp.ones((3, 4)), jnp.ones((4, 2))]), mesh)
      >>> step, flush = jd.distribute(pipeline.step, mesh), jd.distribute(pipeline.flush, mesh)
      >>> losses = []
      >>> for _ in range(20):
      ...     state, value = step(state, jnp.ones((8, 3)))
      ...     losses.append(float(value))
      >>> state, _ = flush(state, None)  # before evaluation
      >>> losses[-1] < 0.1 * losses[0], bool(state.pending)
      (True, False)

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019.
      Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv:1905.03960, 2019.
    """
    if defer < 0:
        raise ValueError(f"defer must be at least 0, got {defer}")
    cfg = _Config(
        local_value_and_grad(loss, axis=axis, has_aux=has_aux),
        optax.with_extra_args_support(tx),
        defer,
        layers,
        exact() if reducer is None else reducer,
        axis,
    )
    return Pipelined(partial(_init, cfg), partial(_step, cfg), partial(_flush, cfg))


class _Config(NamedTuple):
    """The checked arguments of `pipelined`."""

    value_and_grad: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    defer: int
    layers: Sequence[Any] | None
    reducer: Reducer
    axis: AxisNames


def _init(cfg: _Config, params: PyTree) -> PipelinedState:
    opt_state = cfg.tx.init(params)
    split, _ = _split(cfg, params, opt_state)
    reducer = cfg.reducer
    # Folded with the layer's number, so that layers draw different random numbers.
    states = tuple(bind(fold_keys(reducer.init(part), i), cfg.axis) for i, part in enumerate(split.parts))
    carried = tuple(bind(PerWorker(jax.tree.map(jnp.zeros_like, part)), cfg.axis) for part in split.parts[: cfg.defer])
    return PipelinedState(params, opt_state, states, carried, jnp.array(False))


def _step(cfg: _Config, state: PipelinedState, batch: PyTree, *rest: Any) -> tuple[PipelinedState, Any]:
    reducer, defer = cfg.reducer, cfg.defer
    if reducer.law != Law.MEAN:
        refuse_model_axes("this reducer", "use exact(), or all_reduce(reducer, specs=) in an ordinary step")
    # The first layers: last step's gradients. The forward pass of each layer waits only for those up to it.
    split, owners = _split(cfg, state.params, state.opt_state)
    state = _apply_pending(cfg, state, split, owners)
    out, gradients = cfg.value_and_grad(state.params, batch, *rest)
    check_local(gradients, cfg.axis)
    # The later layers: this step's gradients, in the order in which the backward pass computes them.
    by_layer = split_layers(gradients, cfg.layers).parts
    late = {i: by_layer[i] for i in reversed(range(defer, len(by_layer)))}
    means, states = _reduce_layers(cfg, late, state.reducers)
    split = split_layers(state.params, cfg.layers)
    params, opt_state = update_layers(cfg.tx, means, state.opt_state, state.params, split, owners)
    if defer:
        # Step counts and schedules move with the first layers; the later ones are one update ahead of them.
        opt_state = keep_shared(opt_state, state.opt_state, owners)
    carried = tuple(
        PerWorker(gradient, axis=mark.axis, resize=mark.resize) for gradient, mark in zip(by_layer, state.carried)
    )
    return PipelinedState(params, opt_state, states, carried, jnp.array(defer > 0)), _mean(out, cfg.axis)


def _flush(cfg: _Config, state: PipelinedState, batch: Any = None) -> tuple[PipelinedState, tuple[()]]:
    del batch
    state = _apply_pending(cfg, state, *_split(cfg, state.params, state.opt_state))
    carried = jax.tree.map(jnp.zeros_like, state.carried)
    return state._replace(carried=carried, pending=jnp.array(False)), ()


def _split(cfg: _Config, params: PyTree, opt_state: State) -> tuple[LayerSplit, Ownership]:
    check_leaves(params)
    split = split_layers(params, cfg.layers)
    if cfg.defer > len(split.parts):
        raise ValueError(f"defer={cfg.defer} is more than the {len(split.parts)} layers that the parameters have")
    return split, find_owners(cfg.tx, params, opt_state, split)


def _apply_pending(cfg: _Config, state: PipelinedState, split: LayerSplit, owners: Ownership) -> PipelinedState:
    """Reduces the gradients of the first layers that the previous call left, and applies them."""
    if not cfg.defer:
        return state
    gradients = {i: mark.value for i, mark in enumerate(state.carried)}
    means, states = _reduce_layers(cfg, gradients, state.reducers)
    params, opt_state = update_layers(cfg.tx, means, state.opt_state, state.params, split, owners)
    return tree_where(state.pending, state._replace(params=params, opt_state=opt_state, reducers=states), state)


def _reduce_layers(
    cfg: _Config, gradients: dict[int, PyTree], old_states: tuple[State, ...]
) -> tuple[list[PyTree | None], tuple[State, ...]]:
    """Reduces the gradients of layers one after the other, in the order of the dict, with `None` for other layers."""
    comm, reducer = over(cfg.axis), cfg.reducer
    means: list[PyTree | None] = [None] * len(old_states)
    states, previous = list(old_states), ()
    for i, gradient in gradients.items():
        with jax.named_scope(f"layer_{i}"):
            # Each waits for the one before: compilers merge collectives that are independent.
            reduced, states[i] = reducer.reduce(after(gradient, previous), states[i], comm)
        means[i] = previous = reduced.mean
    return means, tuple(states)


def _mean(out: Any, axis: AxisNames) -> Any:
    """The mean over workers of the loss and the auxiliary arrays, in one collective for each dtype."""
    comm = over(axis)
    leaves, structure = jax.tree.flatten(out)
    return structure.unflatten(fuse(comm.mean, [comm.varying(jnp.asarray(leaf)) for leaf in leaves]))
