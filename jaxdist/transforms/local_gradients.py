"""Local gradients: transformations of them, checks that they are not summed yet, and their weighted mean."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import DifferentiallyPrivateAggregateState, HutchinsonState, SAMState

from .._core.compat import mesh_axes_left_over, types_are_checked, varying_axes
from .._core.dtypes import explain_dtype, working_dtype
from .._core.trees import is_overwritten
from .._core.types import Array, AxisNames, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..reducers.reducer import NO_FORMS, Forms
from ..state.marks import (
    OnHost,
    PerWorker,
    Sharded,
    axis_tuple,
    explain_new_tree,
    flatten_marks,
    is_mark,
    name_leaf,
    with_value,
)
from .overwritten import explain_overwritten
from .weights import keep_unsent, keep_unused, scale, weight_of, weight_of_leaves, weight_of_worker, zero_unless


def per_worker(tx: optax.GradientTransformation, *, axis: AxisNames = None) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation on local gradients, before `all_reduce` (momentum, clipping, noise), with its own state.

    On a worker without examples in a step, `update(..., examples=0)` or `active=False`, the transformation gets zeros
    in place of a gradient of no data, which may be NaN, and the state stays as it is; with a tree of numbers, that of
    the leaves with 0.

    *On the wire*: nothing.

    *State*: the state of `tx` as `PerWorker`.

    Args:
      tx: the transformation of local gradients.
      axis: the workers with a state of their own. `None`: those of the train state; name the fast axis inside
        `local_steps` or `noloco` over another one, `axis="chip"`.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = optax.chain(jd.transforms.per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact()), optax.sgd(0.1))
      >>> type(tx.init(jnp.zeros(3))[0]).__name__
      'PerWorker'
    """
    tx = with_extra_args(tx)

    def init_fn(params):
        return PerWorker(tx.init(params), axis=axis, resize="mean")

    def update_fn(updates, state, params=None, **extra_args):
        # A state that is a whole field of the train state has no mark inside the step; it is restored afterwards.
        old = state.value if is_mark(state) else state
        weight = weight_of_leaves(extra_args.get("examples"), extra_args.get("active"), updates)
        if weight is None:
            updates, value = tx.update(updates, old, params, **extra_args)
        else:
            like = updates
            updates, value = tx.update(zero_unless(weight > 0, updates), old, params, **extra_args)
            value = keep_unused(weight > 0, value, old, tx.init, like)
        return updates, with_value(state, value) if is_mark(state) else value

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def check_leaves(tree: PyTree, *, sharded: bool = False) -> None:
    """Checks that all leaves have a mean over workers: no integers, no second parameters, no `Sharded` leaves.

    With `sharded`, leaves may be sharded over another axis.
    """
    refuse_two_sets(tree)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_mark)[0]:
        name = jax.tree_util.keystr(path) or "the gradient"
        if is_overwritten(path):
            raise ValueError(explain_overwritten(name))
        if isinstance(leaf, Sharded) and sharded:
            leaf = leaf.value
        if isinstance(leaf, Sharded):
            raise ValueError(
                f"{name} is Sharded: workers have different parts of it, so it has no mean over workers; "
                "use zero_redundancy for sharded parameters"
            )
        if is_mark(leaf):
            continue
        if problem := explain_dtype(leaf.dtype):
            raise ValueError(f"{name} has dtype {leaf.dtype}: {problem}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name} has dtype {leaf.dtype}: only floating leaves have gradients to reduce; keep counters and "
                "random keys out of the parameters, as nnx.split(model, nnx.Param, ...) does, or exclude the leaf "
                "with optax.masked or optax.partition"
            )


def check_shards(params: PyTree, axis: AxisNames) -> None:
    """Checks that parameters are sharded over other axes than that of the workers that synchronize them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_mark)[0]:
        if isinstance(leaf, Sharded) and (leaf.axis is None or set(axis_tuple(leaf.axis)) & set(axis_tuple(axis))):
            where = "without the name of an axis" if leaf.axis is None else f"over axis {leaf.axis!r}"
            raise ValueError(
                f"{name_leaf('the parameter', path)} is Sharded {where}, and models differ over axis {axis!r}: name "
                "another axis, whose workers share a model, zero.shard(params, axis='chip'), and synchronize over "
                "axis='pod'"
            )


def check_local(updates: Updates, axis: AxisNames, *, reduced: str = "") -> None:
    """Checks, under `shard_map` with checked types, that gradients vary over the axis and so are not summed yet.

    `reduced` is another cause, with its cure, for transformations that take gradients after `all_reduce` too.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if varies_nowhere(leaf, axis):
            raise ValueError(
                f"{name_leaf('the gradient', path)} is the same on all workers of axis {axis!r}: {reduced}jax.grad "
                "of replicated parameters has summed it already, so compressing now saves nothing and averaging is "
                f"wrong; compute it with local_value_and_grad(loss, axis={axis!r})"
            )


def varies_nowhere(leaf: Array, axis: AxisNames) -> bool:
    """Returns whether, under `shard_map` with checked types, a value is typed as equal on all workers of the axis."""
    axes = axis_tuple(axis)
    return types_are_checked(axes) and not varying_axes(leaf).issuperset(axes)


def varies_somewhere(leaf: Array, axis: AxisNames) -> bool:
    """Returns whether, under `shard_map` with checked types, a value is typed as differing between the workers."""
    return bool(varying_axes(leaf) & set(axis_tuple(axis)))


def reduce_weighted(
    reduce: Callable[[Updates, State], tuple[Updates, State]],
    updates: Updates,
    state: State,
    comm: Comm,
    examples: Array | None,
    *,
    plain: bool,
    divide: bool = True,
    forms: Forms = NO_FORMS,
) -> tuple[Updates, State, Array | bool]:
    """Returns the mean of updates weighted by `examples / mean(examples)`; four bytes more on the wire.

    Also returns the new state of `reduce(updates, state) -> (mean, state)`, and a flag that is true if any worker had
    an example: if not, the mean is zero and the state is unchanged. With weights of leaves the flag is `[leaves]`.

    Args:
      examples: the number of examples behind this worker's updates, or `[leaves]`, those behind each leaf, for four
        bytes each; `None`: all workers have the same weight.
      plain: reduces the count together with the updates, in the same collective.
      divide: divides by the mean number of examples; otherwise weights are the examples themselves.
      forms: of the reducer, which may weight workers itself or refuse to.
    """
    if examples is None:
        mean, new_state = reduce(updates, state)
        return mean, new_state, True
    if forms.no_examples is not None:
        raise ValueError(forms.no_examples)
    if examples.ndim and forms.weighted:
        raise ValueError(
            "a median or a trimmed mean takes one number as examples=, got a tree: pass the number of this worker's "
            "examples, or use a mean"
        )
    # A linear reducer averages n_w g_w and n_w together: Σ n_w g_w / Σ n_w in one collective. Not in float16, whose
    # largest number is 65504: a batch of 512 tokens would turn gradients of 200 into infinity.
    if plain and not any(x.dtype == jnp.float16 for x in jax.tree.leaves(updates)):
        (mean, count), new_state = reduce((scale(updates, examples), comm.varying(examples)), state)
        some = count > 0
        mean = scale(mean, 1 / jnp.where(some, count, 1)) if divide else mean
    elif forms.weighted:
        # A maximum of flags, not a sum of counts: NaN for a number of examples must not end the round for all.
        some = comm.max(comm.varying((examples > 0).astype(jnp.float32))) > 0
        mean, new_state = reduce(updates, state)
    # A compressor needs the weight first: entries must not grow with the number of examples.
    else:
        weight, some = weight_of(examples, comm)
        mean, new_state = reduce(scale(updates, weight if divide else examples), state)
    # Without any example the step is skipped, residuals included.
    return zero_unless(some, mean), keep_unsent(some, new_state, state, updates), some


def refuse_model_axes(what: str, advice: str) -> None:
    """Checks that the mesh has no further axes that the compiler shards: flattening leaves would gather them."""
    left = mesh_axes_left_over()
    if left:
        raise ValueError(
            f"the mesh has further axes {left} that the compiler shards, and {what} flattens leaves, which would "
            f"gather them: {advice}"
        )


def local_gradients(
    updates: Updates, axis: AxisNames, examples: Any, active: Any, *, name: str
) -> tuple[Updates, Comm]:
    """Checks the gradients for an optimizer that communicates, weighs them, and converts them to float32 or better."""
    check_leaves(updates)
    comm = over(axis)
    check_local(updates, axis)
    refuse_model_axes("this optimizer", "use all_reduce(reducer, specs=) and an optimizer of optax")
    updates = jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), updates)
    weight = weight_of_worker(examples, active, name=name)
    if weight is not None:
        updates = scale(updates, weight_of(weight, comm)[0])
    return updates, comm


def communicates(node: Any) -> bool:
    """Returns whether a node is the state of a transformation that communicates (an attribute)."""
    return getattr(node, "communicates", False) is True


def explain_wrapped_communication(state: PyTree) -> str | None:
    """Returns advice if a wrapper calls its inner transformation conditionally and must not.

    Where that communicates, has parameters that are sharded themselves, or works in host memory.
    """
    advice = {
        optax.MultiStepsState: "optax.MultiSteps around a transformation that communicates accumulates gradients that "
        "differ between workers: use local_value_and_grad(loss, micro_batches=k), accumulate(tx, k) for k calls of "
        "the step, or put MultiSteps after all_reduce in the chain",
        optax.ApplyIfFiniteState: "optax.apply_if_finite around a transformation that communicates lets each worker "
        "decide separately, and those that communicate never return: use skip_nonfinite(tx), or, only with exact(), "
        "put apply_if_finite after all_reduce in the chain: a reducer with a state keeps the NaN",
    }
    for name in ("conditionally_mask", "conditionally_transform"):
        kind = optax.ConditionallyMaskState if name == "conditionally_mask" else optax.ConditionallyTransformState
        advice[kind] = (
            f"optax.{name} around a transformation that communicates has gradients that differ between workers in its "
            f"other branch: put it inside, zero_redundancy(optax.{name}(optimizer, ...)), or after all_reduce, "
            f"chain(all_reduce(reducer), optax.{name}(...))"
        )
    for node in _nodes(state, lambda x: type(x) in advice):
        if _nodes(tuple(node), communicates):
            return advice[type(node)]
        around = isinstance(node, optax.ApplyIfFiniteState) and _nodes(tuple(node), _may_communicate)
        if around and _has_shards_of_parameters(state):
            return (
                "optax.apply_if_finite lets each worker decide by its own shards of the gradients: use "
                "skip_nonfinite(tx), or put it inside, zero_redundancy(optax.apply_if_finite(optimizer, ...))"
            )
        # Inside offload.host its own sums are in host memory too.
        if isinstance(node, optax.MultiStepsState) and _has(node.inner_opt_state, OnHost) > _has(
            node.acc_grads, OnHost
        ):
            return (
                "optax.MultiSteps around offload.host selects between states in host memory and on the device, which "
                "JAX refuses: put it inside, offload.host(optax.MultiSteps(optimizer, k).gradient_transformation()), "
                "or use accumulate(tx, k)"
            )
    return None


def _may_communicate(node: Any) -> bool:
    # An attribute of the states of all such transformations, True or False.
    return hasattr(node, "communicates")


def _has_shards_of_parameters(state: PyTree) -> bool:
    """Returns whether anything is sharded outside the states of transformations that communicate or shard."""
    outside = jax.tree.leaves(state, is_leaf=lambda x: is_mark(x) or _may_communicate(x))
    return any(isinstance(x, Sharded) for x in outside)


def explain_difference(state: PyTree, path: Any) -> str:
    """Returns what to do about a leaf of the state, at this path, that differs between workers."""
    if is_overwritten(path):
        return (
            "it is a statistic of fp8, whose next value each worker has found in its own rows: take the maximum, "
            "gradients = jd.transforms.agree_on_maximum(gradients, params), before it enters the state"
        )
    # The path may contain the marks or not.
    leaves = zip(jax.tree_util.tree_leaves_with_path(state), flatten_marks(state), strict=True)
    marks = next((leaf.marks for (full, _), leaf in leaves if path in (full, leaf.path)), ())
    if any(isinstance(mark, PerWorker) for mark in marks):
        return (
            "workers that share a model, as the chips of a pod, keep it together, and the gradients of one pod differ "
            "from chip to chip: average them first, optax.chain(jd.all_reduce(jd.exact(), axis='chip'), ...), with "
            "zero_redundancy(..., reducer=None) inside"
        )
    if _has(state, CALLING) and _nodes(state, communicates):
        return (
            "the optimizer calls a function of the parameters, value_fn=, obj_fn= or grad_fn=, that must return the "
            "same on all workers, and so must its gradient: pass jd.transforms.averaged(lambda p: loss_fn(p, batch)); "
            "value= and grad= must be averaged too, jax.lax.pmean(value, 'data')"
        )
    if _leaves_out_parameters(state):
        return (
            "all_reduce inside optax.masked or optax.partition leaves the other leaves as each worker computed them; "
            "put it in front, optax.chain(jd.all_reduce(reducer), optax.masked(...)), and give leaves that are not "
            "trained no reducer, jd.reducers.per_leaf(label_fn, {'trained': reducer, 'frozen': None}); zero_redundancy "
            "takes the mask inside, zero_redundancy(optax.masked(...))"
        )
    return _explain_order(state, tuple(path))


def _explain_order(state: PyTree, path: tuple[Any, ...]) -> str:
    """What to do about a leaf that differs, by whether a transformation in front of it averages gradients."""

    def is_optimizer(node):
        return isinstance(node, tuple) and type(node).__module__.startswith("optax")

    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_optimizer)[0]
    optimizers = [(place, node) for place, node in found if is_optimizer(node)]
    outer, where = _find_communication(state, path)
    # Of a state inside another one, such as that of `zero_redundancy`, `optimizers` has the outer one alone.
    inside = where == "around" or any(path[: len(place)] == place for place, _ in optimizers)
    if inside and where == "behind":
        return (
            "it is in front of the transformation that averages gradients, and sees those of each worker; begin the "
            "chain with all_reduce, optax.chain(jd.all_reduce(reducer), optimizer), or let each worker keep its own "
            "state, optax.chain(jd.transforms.per_worker(...), jd.all_reduce(reducer), ...)"
        )
    if (inside and where is None) or (optimizers and not _nodes(state, communicates)):
        return (
            "the optimizer gets gradients that no transformation in front of it has averaged; begin the chain with "
            "all_reduce, optax.chain(jd.all_reduce(reducer), optimizer)"
        )
    if not _nodes(state, communicates):
        return "mark it PerWorker, or reduce it before it enters the state"
    beside = (
        "an extra argument of the update, such as value=loss, a hyperparameter, or a factor that one worker computed: "
        "average it, jax.lax.pmean(x, axis)"
    )
    if inside:
        return (
            f"gradients are averaged, as {outer} in front of it says, and what differs comes in beside them: {beside}"
        )
    return f"mark it PerWorker, or reduce it before it enters the state; if it is trained, look for {beside}"


def _leaves_out_parameters(state: PyTree) -> bool:
    """Returns whether a transformation that communicates is inside a mask, and some parameters are in no such one."""
    partitions = _nodes(state, lambda node: isinstance(node, optax.PartitionState))
    for node in partitions:
        groups = [bool(_nodes(group, communicates)) for group in _nodes(tuple(node), _is_masked)]
        if any(groups) and not all(groups):
            return True
    elsewhere = _nodes(state, lambda node: _is_masked(node) or isinstance(node, optax.PartitionState))
    return any(_is_masked(node) and _nodes(node.inner_state, communicates) for node in elsewhere)


def _find_communication(state: PyTree, path: tuple[Any, ...]) -> tuple[str, str | None]:
    """The name of the state that communicates next to a leaf, and whether it is "around", "before" or "behind" it."""
    found: tuple[str, str | None] = ("", None)
    node = state
    while path:
        if communicates(node):
            return type(node).__name__, "around"
        if is_mark(node):
            node, path = node.value, path[1:] if getattr(path[0], "name", None) == "value" else path
            continue
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x, node=node: x is not node)
        place = next((i for i, (key, _) in enumerate(children) if key == path[: len(key)]), None)
        if place is None:
            return found
        # The transformations of a chain, whose state is a plain tuple.
        for name, others in (("behind", children[place + 1 :]), ("before", children[:place])):
            nodes = [inner for _, other in others for inner in _nodes(other, communicates)]
            if type(node) is tuple and nodes and found[1] != "before":
                found = type(nodes[0]).__name__, name
        path, node = path[len(children[place][0]) :], children[place][1]
    return found


def explain_metric(state: PyTree, axis: AxisNames) -> str:
    """Returns what to do about a metric that differs between workers."""
    if _has(state, Sharded):
        # The mean of the norms of shards is no norm of the whole.
        return (
            f"average a loss, jd.comm.over({axis!r}).mean(loss); the norm of sharded gradients or parameters is "
            f"jd.zero.global_norm(tree, axis={axis!r})"
        )
    return f"average it with jax.lax.pmean(x, {axis!r})"


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedState)


def _nodes(tree: PyTree, kind: Callable[[Any], bool]) -> list[Any]:
    return [node for node in jax.tree.leaves(tree, is_leaf=kind) if kind(node)]


SEARCHES = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState)
# States of transformations that refuse unknown extra arguments.
STRICT = (*SEARCHES, SAMState)
# States of transformations that call a function.
CALLING = (*STRICT, HutchinsonState)
# Extra arguments that methods with local steps pass to every inner optimizer.
OFFERED = ("anchor", "step", "learning_rate", "examples", "moved")


def filter_extras(state: State, extras: dict[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments of a local step that an optimizer with this state accepts."""
    if _has(state, SAMState) and "grad_fn" not in extras:
        raise ValueError(
            "optax.contrib.sam moves to an adversarial point in every other step, where workers must not synchronize; "
            "use sam(..., opaque_mode=True) and pass grad_fn= to the update, which combines both steps"
        )
    if _has(state, STRICT):
        return {name: value for name, value in extras.items() if name not in OFFERED}
    return extras


def check_searches(state: State, axis: AxisNames) -> None:
    """Refuses line searches on models that differ where types are checked: the loops of optax cannot be typed."""
    if _has(state, SEARCHES) and types_are_checked(axis_tuple(axis)):
        raise ValueError(
            "the line searches of optax start their loops with constants, which JAX cannot type where workers have "
            f'models of their own (axis {axis!r}): use distribute(..., check="values") or simulate'
        )


def refuse_examples(state: State) -> None:
    """Refuses optimizers that need a gradient of each example inside those that average gradients first."""
    if _has(state, DifferentiallyPrivateAggregateState):
        raise ValueError(
            "optax.contrib.dpsgd clips the gradients of single examples, before any mean; put that part in front, "
            "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), zero_redundancy(...))"
        )


def refuse_two_sets(params: PyTree) -> None:
    """Refuses the parameters of `optax.lookahead`."""
    if _has(params, optax.LookaheadParams):
        raise ValueError(
            "optax.lookahead keeps two sets of parameters, of which one has gradients; use "
            "local_steps(inner, optax.sgd(slow_step_size), sync_period=k), whose anchor is the slow set, or "
            "optax.chain(all_reduce(reducer), optax.lookahead(...))"
        )


def with_gradients(params: PyTree) -> PyTree:
    """Returns the parameters that have gradients; of `optax.lookahead`, the fast ones."""
    # The slow parameters follow the fast ones, without gradients.
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_shapes(updates: Updates, params: PyTree | None) -> None:
    """Checks that gradients have the shapes of their parameters; gradients of single examples have not."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return
    for (path, leaf), param in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True):
        if leaf.shape != param.shape:
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} has shape {leaf.shape} and its parameter {param.shape}; "
                "workers average one gradient each. Put a transformation of the gradients of single examples in front: "
                "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), ...)"
            )


def check_outer(outer: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Checks that an outer optimizer needs only the drift and a learning rate: it sees no loss."""
    likes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    try:
        # Traced with shapes only: the mistake shows before the first round.
        jax.eval_shape(lambda p: outer.update(p, outer.init(p), p, learning_rate=0.1), likes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the outer optimizer gets the mean drift and learning_rate= alone, and fails with them: {error}. Use "
            "one that needs no loss, optax.sgd(0.7, momentum=0.9, nesterov=True)"
        ) from error


def _has(tree: PyTree, kind: Any) -> bool:
    return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer, whose update takes extra arguments; raises TypeError for what is no optimizer."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"expected an optimizer, such as optax.adam(1e-3), got {tx!r}")
    plain = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        updates, new = plain.update(updates, state, params, **extra_args)
        # Here, where it can be named: loops and conditions around it would fail with errors about trees.
        if reason := explain_new_tree(state, new):
            raise ValueError(reason)
        return updates, new

    return optax.GradientTransformationExtraArgs(plain.init, update)
