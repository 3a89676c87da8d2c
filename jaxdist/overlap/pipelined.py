"""Gradients of the first layers, reduced at the start of the next step, each just before its layer's forward pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_count
from .._core.jaxprs import propagate
from .._core.order import order_after
from .._core.trees import fold_keys, tree_where
from .._core.types import Array, AxisNames, Bool, PyTree, State
from ..comm.over import over
from ..reducers.exact import exact
from ..reducers.reducer import Law, Reducer, check_reducer
from ..schedule.buckets import LayerSplit, split_layers
from ..state.marks import MARKS, PerWorker, bind
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, check_local, refuse_model_axes
from ..transforms.local_value_and_grad import local_value_and_grad
from ..transforms.mistakes import communicates
from ..wire.buffers import fuse


class PipelinedState(NamedTuple):
    """The state of pipelined training: `params` lack the update of the first layers while `pending`.

    Attributes:
      params: the parameters (replicated). Evaluate and export them only after `flush`.
      opt_state: the state of the optimizer (replicated); each layer's part is as old as its parameters.
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
    """Makes a synchronous step that overlaps communication with the next forward pass too, across step boundaries.

    The gradients `g_i` of the first `defer` layers wait, unreduced, for the next call, which reduces and applies them
    in forward order, one collective a layer: `p_i <- p_i + tx(mean(g_i))`. The forward pass of layer `i` needs only
    those up to `i` and runs beside the reduction of the others. Later layers are reduced inside the step, beside the
    backward pass. Iterates are those of synchronous training; those of the first layers are complete one call later, or
    after `flush`.

    *On the wire*: per step the bytes of the reducer for each layer separately, `L` times its collectives, and a mean of
    4 bytes for the loss.

    *State* (`PipelinedState`): the reducer's for each layer; one worker's gradients of the first `defer` layers.

    Args:
      loss: `loss(params, batch, *rest) -> scalar`, as for `local_value_and_grad`. Layers that it runs in one `lax.scan`
        are one layer here.
      tx: an optimizer of optax that treats each layer separately: Adam, Lion, LAMB, clipping by entry or block. No
        clipping by the global norm, and no `all_reduce`: use `reducer`.
      defer: the number of layers that wait, with the memory of their gradients; with 0 none does.
        `schedule.choose_defer` computes it for a link.
      layers: the top-level entries of the parameters in forward order, tuples of entries where several make up a layer.
        `jd.schedule.forward_order` reads it from a loss. `None`: the order of a sequence.
      reducer: `exact()` by default; with `error_feedback` each layer has its residual.
      has_aux: whether the loss returns `(scalar, aux)`.

    Raises:
      ValueError: before the first collective: `layers` is missing for a dict or does not name each entry once; the
        optimizer's update of one layer depends on another layer's gradient (global norms, `apply_if_finite`,
        `MultiSteps`), or its state communicates.

    Examples:
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
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP, 2019.
      Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv:1905.03960, 2019.
    """
    check_count("defer", defer, 0)
    value_and_grad = local_value_and_grad(loss, axis=axis, has_aux=has_aux)
    reducer = exact() if reducer is None else reducer
    check_reducer(reducer)
    made = _Pipelined(value_and_grad, with_extra_args(tx), defer, layers, reducer, axis)
    return Pipelined(made.init, made.step, made.flush)


class _Ownership(NamedTuple):
    """The number of the layer to which each leaf belongs; `None` for those that all layers share, as step counts."""

    params: list[int]
    state: list[int | None]


class _Pipelined(NamedTuple):
    """The checked arguments of `pipelined`."""

    value_and_grad: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    defer: int
    layers: Sequence[Any] | None
    reducer: Reducer
    axis: AxisNames

    def init(self, params: PyTree) -> PipelinedState:
        opt_state = self.tx.init(params)
        split, _ = self._split(params, opt_state)
        # Folded with the layer's number, so that layers draw different random numbers.
        states = tuple(bind(fold_keys(self.reducer.init(part), i), self.axis) for i, part in enumerate(split.parts))
        carried = tuple(
            bind(PerWorker(jax.tree.map(jnp.zeros_like, part)), self.axis) for part in split.parts[: self.defer]
        )
        return PipelinedState(params, opt_state, states, carried, jnp.array(False))

    def step(self, state: PipelinedState, batch: PyTree, *rest: Any) -> tuple[PipelinedState, Any]:
        if self.reducer.law != Law.MEAN:
            refuse_model_axes("this reducer", "use exact(), or all_reduce(reducer, specs=) in an ordinary step")
        # The first layers: last step's gradients. The forward pass of each layer waits only for those up to it.
        split, owners = self._split(state.params, state.opt_state)
        state = self._apply_pending(state, split, owners)
        out, gradients = self.value_and_grad(state.params, batch, *rest)
        check_local(gradients, self.axis)
        # The later layers: this step's gradients, in the order in which the backward pass computes them.
        by_layer = split_layers(gradients, self.layers).parts
        late = {i: by_layer[i] for i in reversed(range(self.defer, len(by_layer)))}
        means, states = self._reduce_layers(late, state.reducers)
        split = split_layers(state.params, self.layers)
        params, opt_state = _update_layers(self.tx, means, state.opt_state, state.params, split, owners)
        if self.defer:
            # Step counts and schedules move with the first layers; the later ones are one update ahead of them.
            opt_state = _merge(opt_state, state.opt_state, [i is None for i in owners.state])
        carried = tuple(
            PerWorker(gradient, axis=mark.axis, resize=mark.resize) for gradient, mark in zip(by_layer, state.carried)
        )
        return PipelinedState(params, opt_state, states, carried, jnp.array(self.defer > 0)), _mean(out, self.axis)

    def flush(self, state: PipelinedState, batch: Any = None) -> tuple[PipelinedState, tuple[()]]:
        del batch
        state = self._apply_pending(state, *self._split(state.params, state.opt_state))
        carried = jax.tree.map(jnp.zeros_like, state.carried)
        return state._replace(carried=carried, pending=jnp.array(False)), ()

    def _split(self, params: PyTree, opt_state: State) -> tuple[LayerSplit, _Ownership]:
        check_leaves(params)
        split = split_layers(params, self.layers)
        if self.defer > len(split.parts):
            raise ValueError(
                f"defer={self.defer} is more than the {len(split.parts)} layers that the parameters have: pass at most "
                f"defer={len(split.parts)}, or a layer_fn that divides them further"
            )
        return split, _find_owners(self.tx, params, opt_state, split)

    def _apply_pending(self, state: PipelinedState, split: LayerSplit, owners: _Ownership) -> PipelinedState:
        """Reduces the gradients of the first layers that the previous call left, and applies them."""
        if not self.defer:
            return state
        gradients = {i: mark.value for i, mark in enumerate(state.carried)}
        means, states = self._reduce_layers(gradients, state.reducers)
        # p_i <- p_i + tx(mean(g_i))
        params, opt_state = _update_layers(self.tx, means, state.opt_state, state.params, split, owners)
        return tree_where(state.pending, state._replace(params=params, opt_state=opt_state, reducers=states), state)

    def _reduce_layers(
        self, gradients: dict[int, PyTree], old_states: tuple[State, ...]
    ) -> tuple[list[PyTree | None], tuple[State, ...]]:
        """Reduces the gradients of layers one by one, in the order of the dict, with `None` for other layers."""
        comm = over(self.axis)
        means: list[PyTree | None] = [None] * len(old_states)
        states, previous = list(old_states), ()
        for i, gradient in gradients.items():
            with jax.named_scope(f"layer_{i}"):
                # Each waits for the one before: compilers merge collectives that are independent.
                reduced, states[i] = self.reducer.reduce(order_after(gradient, previous), states[i], comm)
            means[i] = previous = reduced.mean
        return means, tuple(states)


def _mean(out: Any, axis: AxisNames) -> Any:
    """Returns the mean over workers of the loss and the auxiliary arrays, in one collective for each dtype."""
    comm = over(axis)
    leaves, structure = jax.tree.flatten(out)
    return structure.unflatten(fuse(comm, comm.mean, [comm.varying(jnp.asarray(leaf)) for leaf in leaves]))


def _find_owners(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, state: State, split: LayerSplit
) -> _Ownership:
    """Returns the layer to which each leaf of an optimizer's state belongs, read from the trace of its update."""
    if any(map(_is_not_replicated, jax.tree.leaves(state, is_leaf=_is_not_replicated))):
        raise ValueError(
            "pipelined does not support optimizers that communicate, or whose state is sharded, per-worker or on the "
            "host: pass an optimizer of optax, and the communication as reducer= (instead of all_reduce)"
        )
    owners = jax.tree.leaves(split.join([jax.tree.map(lambda _, i=i: i, part) for i, part in enumerate(split.parts)]))
    likes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state, params))
    closed, out = jax.make_jaxpr(lambda *args: tx.update(*args), return_shape=True)(*likes)
    if jax.tree.structure(out[1]) != jax.tree.structure(state):
        raise ValueError("pipelined needs an optimizer whose update returns a state with the tree of its init")
    # Sets of layers as bit masks: the layers whose gradients each leaf depends on.
    params_masks = [1 << i for i in owners]
    state_masks = [0] * len(jax.tree.leaves(state))
    # Repeated to a fixed point, since the state of one step enters the next.
    while True:
        masks, merges = propagate(closed, [*params_masks, *state_masks, *params_masks])
        new_masks = [old | new for old, new in zip(state_masks, masks[len(params_masks) :], strict=True)]
        if new_masks == state_masks:
            break
        state_masks = new_masks
    for own, mask in zip([*params_masks, *([None] * len(state_masks))], masks, strict=True):
        # An update may depend on its own layer, a leaf of the state on any one layer.
        allowed = (own is None and mask.bit_count() <= 1) or mask | (own or 0) == own
        if not allowed:
            raise ValueError(_refusal(split, own, mask, merges))
    return _Ownership(owners, [mask.bit_length() - 1 if mask else None for mask in state_masks])


def _update_layers(
    tx: optax.GradientTransformationExtraArgs,
    gradients: Sequence[Any],
    state: State,
    params: PyTree,
    split: LayerSplit,
    owners: _Ownership,
) -> tuple[PyTree, State]:
    """Updates the layers that have a gradient (not `None`), their leaves of the state and those that all layers share.

    `split` are the parameters by layer.
    """
    active = {i for i, gradient in enumerate(gradients) if gradient is not None}
    # The update of one layer does not depend on the others' gradients, so zeros may take their place.
    all_gradients = [
        jax.tree.map(jnp.zeros_like, part) if gradient is None else gradient
        for part, gradient in zip(split.parts, gradients, strict=True)
    ]
    updates, new_state = tx.update(split.join(all_gradients), state, params)
    new_params = optax.apply_updates(params, updates)
    return (
        _merge(params, new_params, [i in active for i in owners.params]),
        _merge(state, new_state, [i is None or i in active for i in owners.state]),
    )


def _merge(old: PyTree, new: PyTree, take_new: Sequence[bool]) -> PyTree:
    """Returns the tree `old` with some of its leaves taken from `new`."""
    leaves, structure = jax.tree.flatten(old)
    pairs = zip(leaves, jax.tree.leaves(new), take_new, strict=True)
    return structure.unflatten([b if take else a for a, b, take in pairs])


def _refusal(split: LayerSplit, own: int | None, mask: int, merges: list[Any]) -> str:
    def name(bits):
        layer = split.parts[bits.bit_length() - 1]
        return ", ".join(map(str, layer))

    # A leaf of the state, with `own` `None`, may belong to one layer: the last one that it depends on.
    others = mask & ~(own or (1 << (mask.bit_length() - 1)))
    subject = "the optimizer's state" if own is None else f"the update of layer {name(own)}"
    layers = f"{name(others)}" if own is not None else f"{name(others)} and {name(mask)} together"
    culprit = _culprit(merges)
    return (
        f"{subject} depends on the gradient of {layers}{f' ({culprit})' if culprit else ''}, but pipelined updates "
        "each layer before the gradients of the others are reduced. Use a transformation that treats each leaf "
        "separately (optax.clip, optax.clip_by_block_rms, optax.adaptive_grad_clip), or all_reduce, which waits for all"
    )


def _culprit(merges: list[Any]) -> str | None:
    """The name of the transformation whose update first combined layers."""
    for equation in merges:
        traceback = equation.source_info.traceback
        for frame in [] if traceback is None else traceback.frames:
            names = frame.function_name.split(".")
            if len(names) > 1 and "update" in names[-1] and "/jax/" not in frame.file_name:
                return names[0]
    return None


def _is_not_replicated(node: Any) -> bool:
    return communicates(node) or isinstance(node, MARKS)
