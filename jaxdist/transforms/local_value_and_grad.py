"""The gradient of one worker's loss, without the all-reduce of `jax.grad`, and the parameters it does not reach."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.checks import check_range
from .._core.compat import cast_varying, like_of, mesh_axes_being_mapped, vary_like, zeros_like_shape
from .._core.dtypes import widest_float, working_dtype
from .._core.jaxprs import find_forwarded, propagate
from .._core.trees import fold_keys, is_overwritten, map_with_collections
from .._core.types import Array, AxisNames, PyTree
from ..comm.over import over
from ..state.flax_marks import STREAMS, variables_by_path
from ..state.marks import axis_tuple, is_mark, name_leaf
from .divisor import find_divisor
from .weights import as_number
from .weights import scale_leaves as scale_by


def to_varying(tree: PyTree, axis: AxisNames) -> PyTree:
    """Types every leaf as differing between the workers of an axis; a no-op outside `shard_map`."""
    names = mesh_axes_being_mapped() & set(axis_tuple(axis))
    return jax.tree.map(lambda leaf: cast_varying(leaf, names), tree)


def local_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: AxisNames = "data",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    micro_batches: int = 1,
    weights: Callable[[Any], Any] | None = None,
    scale: Array | float | int | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of this worker's loss: the gradient is local, and nothing is sent.

    Under `shard_map`, `jax.grad` of replicated parameters is the *sum* over workers. Here they are typed as varying.

    With `micro_batches=k` the batch is split into `k` parts along its first dimension, and gradients are summed in
    float32 (fp8 statistics: `agree_on_maximum`). With `n_i`, the number of examples that the loss `L_i` of a part is
    the mean of,

        value = Σ n_i L_i / Σ n_i

    and its gradient are those of the whole batch. The number is `weights(part_i)`, or the loss's own divisor: that of
    `sum(errors * mask) / max(mask.sum(), 1)` is found in its trace. Without a divisor parts count alike.

    *On the wire*: nothing; with numbers and `Sharded` parameters 4 bytes: the gradients of all leaves are then weighted
    by `Σ_i n_i` over its mean, so that means over workers are those of all examples.

    Args:
      argnums: the arguments to differentiate. The first other one is the batch, whose arrays are split. PRNG keys are
        folded with the number of the part; the batch's scalars and other arguments are passed unchanged.
      has_aux: whether the loss also returns auxiliary data. Floating leaves are averaged like the value, integers
        summed; booleans: any.
      micro_batches: the number of parts. Layers of `zero.gathered` communicate in each (`docs/reference/zero.md`).
      weights: such as `lambda batch: batch["mask"].sum()`. Parts of number 0 are left out, even if their loss is 0/0
        (not of `Sharded` parameters); if all are, the result is zero.
      scale: multiplies the loss, not the returned value, in float32: `loss_scale(opt_state)`.

    Raises:
      ValueError: `micro_batches` does not divide the batch; a number of the batch divides the loss in another way;
        a weight is no number; a leaf to differentiate is not floating; the loss changes Variables of nnx without
        auxiliary data.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> loss = lambda w, x: jnp.mean(w * x)
      >>> value, gradient = jd.local_value_and_grad(loss, micro_batches=2)(jnp.array(2.0), jnp.array([1.0, 3.0]))
      >>> float(value), float(gradient)
      (4.0, 2.0)
    """
    check_range("micro_batches", micro_batches, 1, ends="[]")

    def whole(*args, factor: Any = scale):
        differentiated = _positions(argnums, len(args))
        _check_differentiable(args, differentiated)
        # The cast to varying is transposed to an all-reduce: before `grad` it is outside of what is differentiated.
        args = [to_varying(arg, axis) if i in differentiated else arg for i, arg in enumerate(args)]
        return _value_and_grad(loss, axis, argnums, has_aux, factor)(*args)

    if weights is None and micro_batches == 1:
        return whole

    def in_parts(*args):
        divided = _divide(argnums, micro_batches, args)
        found = _weigh_by_divisor(loss, has_aux, divided) if weights is None else _weigh_by(weights, divided)
        return (
            _sum_over_parts(whole, divided, axis)
            if found is None
            else _weigh_parts(whole, divided, axis, *found, scale)
        )

    return in_parts


def _positions(argnums: int | Sequence[int], count: int) -> list[int]:
    """The arguments of a call that are differentiated, of which negative numbers count from the end."""
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if wrong := [number for number in numbers if not -count <= number < count]:
        raise ValueError(f"argnums={argnums} has {wrong[0]}, but the call has {count} positional arguments")
    return [number % count for number in numbers]


def _sum_over_parts(value_and_grad: Callable[..., Any], divided: "_Divided", axis: AxisNames) -> Any:
    """Averages values and gradients over the parts of the batch, in a loop."""
    total, shapes = _sum_parts(lambda number, _, part: value_and_grad(*divided.arguments(number, part)), divided, axis)
    value = jax.tree.map(lambda t, x: _finish(t, x.dtype, divided.parts), total[0], shapes[0])
    gradients = map_with_collections(
        lambda path, t, x: t.astype(x.dtype) if is_overwritten(path) else _finish(t, x.dtype, divided.parts),
        total[1],
        shapes[1],
    )
    return value, gradients


def _weigh_by(weights: Callable[[Any], Any], divided: "_Divided") -> tuple[Array, Array]:
    """The share of each part, and the sum of their weights, before the loop: they depend on the batch alone."""

    def weight_of_part(numbered: Any) -> Array:
        arguments = divided.arguments(*numbered)
        return as_number("the result of weights", weights(arguments[divided.batch]), widest_float())

    found = lax.map(weight_of_part, (jnp.arange(divided.parts), divided.stack))
    total = found.sum()
    return found / jnp.where(total > 0, total, 1), total


def _weigh_by_divisor(loss: Callable[..., Any], has_aux: bool, divided: "_Divided") -> tuple[Array, Array] | None:
    """What `_weigh_by` returns for a loss that is a mean over a number of the batch; `None` for one that is not."""
    first = jax.tree.map(lambda x: x[0], divided.stack)
    trees = [divided.args[i] for i in divided.differentiated]

    def value_of(trees: list[Any], number: Array, part: PyTree) -> Any:
        arguments = divided.arguments(number, part)
        for i, tree in zip(divided.differentiated, trees, strict=True):
            arguments[i] = tree
        out = loss(*arguments)
        return out[0] if has_aux else out

    traced = jax.make_jaxpr(value_of)(trees, jnp.zeros((), jnp.int32), first)

    @functools.cache
    def trace_larger() -> Any:
        larger = jax.tree.map(lambda x: like_of(x, (2 * x.shape[0], *x.shape[1:]), x.dtype), first)
        try:
            return jax.make_jaxpr(value_of)(trees, jnp.zeros((), jnp.int32), larger)
        except Exception:  # a loss that takes one number of rows may raise anything
            return None

    def find(numbered: Any) -> Any:
        count = len(jax.tree.leaves(trees))
        return find_divisor(traced, count, jax.tree.leaves(numbered), parts=divided.parts, trace_larger=trace_larger)

    if jax.eval_shape(find, (jnp.zeros((), jnp.int32), first)) is None:
        return None
    number, guarded, bound, offset = lax.map(find, (jnp.arange(divided.parts), divided.stack))
    total = number.sum()
    # L_i = N_i / guarded_i, and that of the whole batch is Σ N_i / max(Σ n_i, c), or Σ N_i / (Σ n_i + c). The shares
    # add up to 1, for terms without the batch, if no part has a number between 0 and c.
    bounded = jnp.maximum(total, bound[0]) + offset[0]
    return jnp.where(bounded != 0, guarded / jnp.where(bounded != 0, bounded, 1), 0), total


def _weigh_parts(
    value_and_grad: Callable[..., Any],
    divided: "_Divided",
    axis: AxisNames,
    shares: Array,
    total: Array,
    scale: Any,
) -> Any:
    """Averages values and gradients over the parts of the batch, each with its share of the weight of all."""
    args = divided.args
    is_sharded = any(map(is_mark, jax.tree.leaves([args[i] for i in divided.differentiated], is_leaf=is_mark)))

    # The gradient of a shard is a mean over workers: its loss is weighted, by n_wi / mean_w(Σ_i n_wi).
    of_all = over(axis).mean(over(axis).varying(total)) if is_sharded else total
    factor = total / jnp.where(of_all > 0, of_all, 1)

    def evaluate_part(number: Array, share: Array, part: PyTree) -> Any:
        arguments = divided.arguments(number, part)
        if is_sharded:
            out, gradients = value_and_grad(*arguments, factor=share * factor * (1 if scale is None else scale))
            # So is that of a replicated parameter, whose plain mean is still to be taken: no update gets `examples=`.
            own = (share > 0).astype(jnp.float32)
        else:
            (out, gradients), own = value_and_grad(*arguments), share
        counts = (share > 0) | (total == 0)
        weigh = functools.partial(_weigh_gradient, own, counts)
        return _weigh(share, out), map_with_collections(weigh, gradients, is_leaf=is_mark)

    if divided.parts == 1:
        return evaluate_part(jnp.zeros((), jnp.int32), shares[0], jax.tree.map(lambda x: x[0], divided.stack))
    total_of_parts, shapes = _sum_parts(evaluate_part, divided, axis, shares)
    return jax.tree.map(lambda t, x: t.astype(x.dtype), total_of_parts, shapes)


def _weigh_gradient(share: Array, counts: Array, path: Any, gradient: Any) -> Any:
    if is_overwritten(path):
        # Of the statistics the maximum is taken: that of a part that does not count is below all others.
        return jnp.where(counts, gradient, jnp.asarray(-jnp.inf, gradient.dtype))
    # That of a shard is weighted already.
    return gradient if is_mark(gradient) else _weigh(share, gradient)


def _weigh(share: Array, tree: PyTree) -> PyTree:
    """Multiplies floating leaves, in float32; a share of 0 gives 0 even for NaN."""
    tree = jax.tree.map(jnp.asarray, tree)
    floating = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)
    weighed = scale_by(floating, share)
    return jax.tree.map(lambda x, y: y if x is None else x, weighed, tree, is_leaf=lambda x: x is None)


class _Divided(NamedTuple):
    """A call whose argument number `batch` is split: `stack` has its arrays, `[parts, ...]`, and `None` for scalars."""

    args: Sequence[Any]
    differentiated: list[int]
    batch: int
    parts: int
    stack: PyTree

    def arguments(self, number: Any, part: PyTree) -> list[Any]:
        """The arguments for one part."""
        # Each part draws its own random numbers; a single one those of the whole.
        folded = [
            arg if i in self.differentiated or self.parts == 1 else fold_keys(arg, number)
            for i, arg in enumerate(self.args)
        ]
        folded[self.batch] = jax.tree.map(
            lambda x, whole: whole if x is None else x, part, folded[self.batch], is_leaf=lambda x: x is None
        )
        return folded


def _divide(argnums: int | Sequence[int], parts: int, args: Sequence[Any]) -> _Divided:
    differentiated = _positions(argnums, len(args))
    batch = next((i for i in range(len(args)) if i not in differentiated), None)
    if batch is None:
        raise ValueError("micro_batches= or weights= needs a batch argument besides the differentiated ones")
    stack = jax.tree.map(lambda x: None if jnp.ndim(x) == 0 else _split(x, parts), args[batch])
    return _Divided(args, differentiated, batch, parts, stack)


def _sum_parts(
    evaluate_part: Callable[..., Any], divided: _Divided, axis: AxisNames, shares: Array | None = None
) -> tuple[PyTree, PyTree]:
    """Adds up `evaluate_part(number, share, part)` in a loop; returns the sum, in float32, and the shapes of a term."""

    def add_part(total, numbered):
        number, _, _ = numbered
        value, gradients = evaluate_part(*numbered)
        # The next value of a statistic is the largest of those of all parts, of which the first has none before it.
        gradients = map_with_collections(
            lambda path, t, x: (
                jnp.where(number == 0, x, jnp.maximum(t, x)).astype(t.dtype)
                if is_overwritten(path)
                else t + jnp.asarray(x, t.dtype)
            ),
            total[1],
            gradients,
        )
        value = jax.tree.map(lambda t, x: t + jnp.asarray(x, t.dtype), total[0], value)
        return (value, gradients), None

    stack = (jnp.arange(divided.parts), shares, divided.stack)
    shapes = jax.eval_shape(lambda first: evaluate_part(*first), jax.tree.map(lambda x: x[0], stack))
    # Over a further axis each sum differs as its terms do.
    zeros = jax.tree.map(lambda x: vary_like(zeros_like_shape(x, _sum_dtype(x.dtype)), x), shapes)
    # The loss of a replicated batch is replicated, but a sum of local ones is not: type all of it as local.
    zeros = to_varying(zeros, axis)
    return lax.scan(add_part, zeros, stack)[0], shapes


def _value_and_grad(
    loss: Callable[..., Any],
    axis: AxisNames,
    argnums: int | Sequence[int],
    has_aux: bool,
    scale: Array | float | int | None,
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad` with the gradients of `scale` times the loss."""
    loss = _check_changes(loss) if not has_aux else loss

    def scale_loss(*args):
        out = loss(*args)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"with has_aux=True the loss must return (value, aux), got {type(out).__name__}")
        value: Any = out[0] if has_aux else out
        # In float32: S times the loss would overflow float16.
        wide = working_dtype(value.dtype)
        scaled = value if scale is None else value.astype(wide) * jnp.asarray(scale, wide)
        # A loss that is a mean over workers is the loss of each of them, not one loss of all.
        return to_varying(scaled, axis), out

    differentiated = jax.value_and_grad(scale_loss, argnums=argnums, has_aux=True)

    def value_and_grad(*args):
        (_, out), gradients = differentiated(*args)
        return out, gradients

    return value_and_grad


def _check_differentiable(args: Sequence[Any], differentiated: Sequence[int]) -> None:
    """Checks that leaves have gradients; nnx modules that store random streams have leaves that have none."""
    for i in differentiated:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            dtype = jax.dtypes.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.inexact):
                raise ValueError(
                    f"{name_leaf('the differentiated argument', path)} has dtype {dtype} and so no gradient: "
                    "differentiate the parameters alone, which nnx.split(model, nnx.Param, ...) gives. If it belongs "
                    f"to a random stream of nnx: {STREAMS}"
                )


def _check_changes(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, which must not change a Variable of nnx, such as running statistics."""

    def checked_loss(*args):
        # A module is changed in place, and it is a copy of the one that the step has.
        before = variables_by_path(args)
        leaves, structure = jax.tree.flatten(args)
        value = loss(*args)
        after = variables_by_path(args)
        replaced = [path for path, leaf in before.items() if after.get(path, leaf) is not leaf]
        if changed := replaced and _find_changed(loss, structure, leaves, replaced):
            raise ValueError(
                f"the loss changes {name_leaf('its argument', changed[0][:-1])}, and the change would be lost: return "
                "it, local_value_and_grad(loss, has_aux=True), as nnx.state(model, nnx.BatchStat) gives it, and "
                "average it over workers (docs/how-to/use-flax.md)"
            )
        return value

    return functools.wraps(loss)(checked_loss)


def _find_changed(loss: Callable[..., Any], structure: Any, leaves: list[Any], paths: list[Any]) -> list[Any]:
    """The Variables, of those that the loss replaces, that it does not replace by what they were.

    `nnx.remat` and `nnx.jit` write all Variables of a module back, from results that their function passes through.
    """
    numbers = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def run_loss(arrays):
        known = list(leaves)
        for i, x in zip(numbers, arrays, strict=True):
            known[i] = x
        args = structure.unflatten(known)
        loss(*args)
        after = variables_by_path(args)
        return [after[path] for path in paths]

    sources = find_forwarded(jax.make_jaxpr(run_loss)([leaves[i] for i in numbers]))
    places = variables_by_path(structure.unflatten(range(len(leaves))))
    return [
        path for path, source in zip(paths, sources, strict=True) if source is None or numbers[source] != places[path]
    ]


def _split(x: Any, parts: int) -> Any:
    if x.shape[0] % parts:
        raise ValueError(f"micro_batches={parts} must divide the first dimension of the batch, got shape {x.shape}")
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _sum_dtype(dtype: Any) -> Any:
    return working_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _finish(total: Any, dtype: Any, parts: int) -> Any:
    return (total / parts).astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total


def find_unused_parameters(
    loss: Callable[..., Any], params: PyTree, *args: Any, has_aux: bool = False, axis: AxisNames = "data"
) -> PyTree:
    """Finds the parameters whose gradients are zero for every batch: an idle head, or leaves behind `stop_gradient`.

    The gradient is traced, not computed, and followed from the loss to each leaf. It is a static answer for static
    programs: both branches of a `lax.cond` count as used, and so does a leaf that is multiplied by 0. The result is a
    tree of booleans like the parameters, for `recipes.ddp(unused=)`: `True` where no gradient can arrive.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> params = {"body": jnp.ones(3), "head": jnp.ones(2)}
      >>> jd.transforms.find_unused_parameters(lambda p, x: jnp.sum(p["body"] * x), params, jnp.ones(3))
      {'body': False, 'head': True}
    """
    leaves, structure = jax.tree.flatten(params)

    # The cotangent is an input of the trace, so that it can be followed.
    def gradient(cotangent, leaves, args):
        value, pull, *_ = jax.vjp(lambda p: loss(structure.unflatten(p), *args), leaves, has_aux=has_aux)
        if value.shape != ():
            raise ValueError(f"loss must return one number, got shape {value.shape}")
        # What is zero by structure does not depend on the cotangent.
        return pull(cotangent.astype(value.dtype))[0]

    # Collectives of the loss, over an axis of no mesh.
    for name in axis_tuple(axis):
        gradient = jax.vmap(gradient, in_axes=None, axis_name=name, axis_size=2)
    traced = jax.make_jaxpr(gradient)(jnp.ones(()), _shapes(leaves), _shapes(args))
    # A single label: the cotangent. A gradient without it is zero.
    labels = [1] + [0] * (len(traced.jaxpr.invars) - 1)
    return structure.unflatten([not reached for reached in propagate(traced, labels, loops=True).masks])


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, tree)
