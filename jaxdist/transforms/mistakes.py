"""Explains common mistakes with transformations that communicate."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import HutchinsonState

from .._core.trees import is_overwritten, leaves_with_collections
from .._core.types import AxisNames, PyTree
from ..state.marks import OnHost, PerWorker, Sharded, flatten_marks, is_mark
from .extra_args import STRICT, has_type


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
        if isinstance(node, optax.MultiStepsState) and has_type(node.inner_opt_state, OnHost) > has_type(
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
    named = zip(jax.tree_util.tree_leaves_with_path(state), leaves_with_collections(state), strict=True)
    if is_overwritten(path) or any(path == full and is_overwritten(name) for (full, _), (name, _) in named):
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
    if has_type(state, CALLING) and _nodes(state, communicates):
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
    if has_type(state, Sharded):
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


# States of transformations that call a function.
CALLING = (*STRICT, HutchinsonState)
