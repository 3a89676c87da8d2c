"""Gradients of the first layers reduced at the start of the next step, each right before its layer's forward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.trees import fold_keys
from .._core.types import Array, AxisNames, Bool, PyTree, State
from ..comm.over import over
from ..reducers.base import Law, Reducer
from ..reducers.exact import exact
from ..schedule.forward_order import take_apart
from ..state.marks import PerWorker, bind
from ..transforms.local_gradients import check_leaves, check_local, refuse_model_axes
from ..transforms.local_value_and_grad import local_value_and_grad
from ..wire.encoded import after
from ..wire.flat import fused
from .layerwise import keep_shared, ownership, select, update_some


class PipelinedState(NamedTuple):
    """The state of a pipelined training: `params` lack the update of the first layers while `pending`.

    Attributes:
      params: agreed. Evaluate and export them after `flush` only.
      opt_state: of the optimizer, agreed; each layer's part is as old as its parameters.
      reducers: the reducer's state of each layer, in forward order.
      carried: per worker: the gradient of each of the first layers that was not reduced yet.
      pending: whether there is one (agreed).
    """

    params: PyTree
    opt_state: State
    reducers: tuple[State, ...]
    carried: tuple[PyTree, ...]
    pending: Bool[Array, ""]


class Pipelined(NamedTuple):
    """What `pipelined` returns.

    Attributes:
      init: `init(params) -> PipelinedState`.
      step: `step(state, batch, *rest) -> (state, loss)` as one worker sees it, for `distribute` and `simulate`. The
        loss is the mean over workers; with `has_aux` a pair: that, and the mean of the auxiliary arrays.
      flush: `flush(state, batch=None) -> (state, ())`: reduces and applies what is pending. A step too:
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
    """Synchronous training whose communication lies beside the next forward pass too, across the border of steps.

    Backward ends with the first layers, so in an ordinary step nothing is left to hide their reduction behind. Here the
    gradients `g_i` of the first `defer` layers wait, unreduced, for the next call. It reduces and applies them in
    forward order, one collective a layer, `p_i <- p_i + tx(mean(g_i))`, and the forward pass of layer `i` needs only
    those up to `i`: the reduction of the others runs beside it. The later layers are reduced inside the step, beside
    the backward pass, in its order. Nothing is stale: the iterates are those of synchronous training, but for the first
    layers they are there one call later, or after `flush`.

    *On the wire*: per step what the reducer sends for each layer by itself, `L` times its collectives, and a mean of 4
    bytes for the loss. The first call reduces zeros.

    *State* (`PipelinedState`): the reducer's for each layer; one worker's gradients of the first `defer` layers. When
    the number of workers changes, the new ones carry the mean of the old ones', and the run goes on as it would have.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`, as for `local_value_and_grad`. Layers that it runs in one
        `lax.scan` are one layer here.
      tx: an optimizer of optax that looks at one layer at a time: Adam, Lion, LAMB, clipping by entry or block. No
        clipping by the global norm, and no `all_reduce`: that is `reducer`.
      defer: how many layers wait; 0 is an ordinary step with a collective for each layer. More hides more behind the
        forward pass, and less behind backward; it takes the memory of their gradients. Start at half of them.
      layers: the top-level entries of the parameters in forward order, tuples of entries where several make up a layer
        (a collective for every bias costs its latency). `jd.schedule.forward_order` reads it from a loss. `None`: the
        order of a sequence.
      reducer: `exact()` unless told; with `error_feedback` each layer has its residual.
      axis: the mesh axis of the workers.
      has_aux: whether the loss returns `(scalar, aux)`.

    Returns:
      `Pipelined(init, step, flush)`.

    Raises:
      ValueError: `defer` is negative, or more than there are layers; `layers` is missing for a dict or does not name
        each entry once; the optimizer's update of one layer depends on another layer's gradient (global norms,
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
      Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv 1905.03960, 2019.
    """
    if defer < 0:
        raise ValueError(f"defer must be at least 0, got {defer}")
    reducer = exact() if reducer is None else reducer
    whole_tx = optax.with_extra_args_support(tx)
    value_and_grad = local_value_and_grad(loss, axis=axis, has_aux=has_aux)

    def plan(params, opt_state):
        check_leaves(params)
        cut = take_apart(params, layers)
        if defer > len(cut.parts):
            raise ValueError(f"defer={defer} is more than the {len(cut.parts)} layers that the parameters have")
        return cut, ownership(whole_tx, params, opt_state, cut)

    def init(params):
        opt_state = whole_tx.init(params)
        cut, _ = plan(params, opt_state)
        # Layers must not share their draws.
        states = tuple(bind(fold_keys(reducer.init(part), i), axis) for i, part in enumerate(cut.parts))
        carried = tuple(bind(PerWorker(jax.tree.map(jnp.zeros_like, part)), axis) for part in cut.parts[:defer])
        return PipelinedState(params, opt_state, states, carried, jnp.array(False))

    def reduce_layers(gradients, states):
        """In this order, a collective at a time: `gradients` maps the number of a layer to its gradient."""
        comm = over(axis)
        means, states, previous = [None] * len(states), list(states), ()
        for i, gradient in gradients.items():
            with jax.named_scope(f"layer_{i}"):
                reduced, states[i] = reducer.reduce(after(gradient, previous), states[i], comm)
            means[i] = previous = reduced.mean
        return means, tuple(states)

    def apply_pending(state, cut, own):
        """The first layers, as the call before left them."""
        if not defer:
            return state
        gradients = {i: carried.value for i, carried in enumerate(state.carried)}
        means, states = reduce_layers(gradients, state.reducers)
        params, opt_state = update_some(whole_tx, means, state.opt_state, state.params, cut, own)
        moved = state._replace(params=params, opt_state=opt_state, reducers=states)
        return select(state.pending, moved, state)

    def step(state, batch, *rest):
        if reducer.law != Law.MEAN:
            refuse_model_axes("this reducer", "use exact(), or all_reduce(reducer, specs=) in an ordinary step")
        cut, own = plan(state.params, state.opt_state)
        state = apply_pending(state, cut, own)
        out, gradients = value_and_grad(state.params, batch, *rest)
        check_local(gradients, axis)
        mine = take_apart(gradients, layers).parts
        late = {i: mine[i] for i in reversed(range(defer, len(mine)))}
        means, states = reduce_layers(late, state.reducers)
        cut = take_apart(state.params, layers)
        params, opt_state = update_some(whole_tx, means, state.opt_state, state.params, cut, own)
        if defer:
            # Step counts and schedules move with the first layers; the later ones are one update ahead of them.
            opt_state = keep_shared(opt_state, state.opt_state, own)
        carried = tuple(
            PerWorker(gradient, axis=mark.axis, resize=mark.resize) for gradient, mark in zip(mine, state.carried)
        )
        new = PipelinedState(params, opt_state, states, carried, jnp.array(defer > 0))
        return new, _mean(out, axis)

    def flush(state, batch=None):
        del batch
        state = apply_pending(state, *plan(state.params, state.opt_state))
        carried = jax.tree.map(jnp.zeros_like, state.carried)
        return state._replace(carried=carried, pending=jnp.array(False)), ()

    return Pipelined(init, step, flush)


def _mean(out: Any, axis: AxisNames) -> Any:
    """Of the loss and what came with it, in one collective for each dtype."""
    comm = over(axis)
    leaves, structure = jax.tree.flatten(out)
    return structure.unflatten(fused(comm.mean, [comm.varying(jnp.asarray(leaf)) for leaf in leaves]))
