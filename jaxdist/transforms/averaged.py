"""Functions of parameters that an optimizer calls (`value_fn`, `grad_fn`, `obj_fn`), averaged over the workers."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._core.compat import mesh_axes_being_mapped, types_are_checked, varying_axes
from .._core.dtypes import working_dtype
from .._core.jaxprs import CASTS, WHOLE, inner_jaxprs
from .._core.types import Array, AxisNames, PyTree
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import axis_tuple, is_mark
from .weights import scale_leaves, weight_of, weight_of_worker

# The functions that optimizers of optax call, with what they pass besides the parameters.
CALLED = {"value_fn": (), "obj_fn": (), "grad_fn": (0,)}


def averaged(
    f: Callable[..., Any], *, axis: AxisNames = "data", examples: Any = None, active: Any = None
) -> Callable[..., Any]:
    """The mean over workers of `f(params, ...)`, and its derivatives: for functions that an optimizer calls.

    Line searches, SAM and Sophia call a function of the parameters at other points than the current ones. On several
    workers it must return the same numbers on all of them: write `value_fn=averaged(lambda p: loss_fn(p, batch))` with
    this worker's batch, for an optimizer behind `all_reduce`. Inside `zero_redundancy` functions are averaged anyway.

    Its gradient is the mean too, under `distribute` with either `check` and in `simulate`, where that of a
    `jax.lax.pmean` may be local (docs/explanation/what-grad-means-inside-shard-map.md).

    *On the wire*: an all-reduce of the results, and in the backward pass one of the gradient; with `examples` or
    `active` four bytes more.

    Args:
      f: a function of the parameters, which are equal on all workers, and of other arguments. It may return this
        worker's value or the mean of all, and any pytree: a loss, or the gradients of `local_value_and_grad`.
      axis: the axis of the workers, or the axes; `None` is a single worker.
      examples: the number of examples of this worker, as for the update of `all_reduce`: the mean is weighted by it,
        and a worker with 0 is left out, even if its results are NaN. If all have 0, the results are 0. In a chain, the
        update of line searches and SAM refuses `examples=` itself: call that of `all_reduce` separately before it.
      active: a boolean of this worker; false leaves it out.

    Returns:
      The function with the same arguments. Floating results are means; others stay as they are.

    Raises:
      ValueError: `examples` is a tree; when the function is called, if types are checked, for results that differ
        between workers although `f` communicates, of which it cannot be told what is missing, and for integers that
        differ.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> def step(w, x):
      ...     loss = jd.transforms.averaged(lambda w: x[0] * w**2)
      ...     return w, jax.value_and_grad(loss)(w)
      >>> _, (value, gradient) = jd.simulate(step, workers=2)(jnp.array(3.0), jnp.array([1.0, 2.0]))
      >>> float(value), float(gradient)  # of 1.5 w²
      (13.5, 9.0)
    """
    weight = weight_of_worker(examples, active, name="averaged")
    # Once, and not in each call: a search calls the function in a loop.
    factor = None if weight is None else weight_of(weight, over(axis))[0]
    return average_function(f, axis, getattr(f, "__name__", "f"), factor)


def average_function(
    f: Callable[..., Any], axis: AxisNames, name: str, factor: Array | None = None
) -> Callable[..., Any]:
    """`averaged`, with the name of the function in error messages; `factor` is this worker's weight over their mean."""

    # The wrapped function's signature is kept: line searches pass on the arguments that it names.
    @functools.wraps(f)
    def evaluate_mean(params, *args, **kwargs):
        return _as_whole(lambda p: _call(lambda q: f(q, *args, **kwargs), p, axis, name, factor))(params)

    evaluate_mean.__dict__.update(is_averaged=True, is_weighted=factor is not None)
    return evaluate_mean


def _as_whole(f: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """The function as one equation of a trace and of its derivatives, which `zero_redundancy` evaluates as a whole."""
    f.__name__ = f.__qualname__ = WHOLE
    return jax.jit(f)


def average_arguments(extra_args: dict[str, Any], axis: AxisNames, weight: Array | None = None) -> dict[str, Any]:
    """An optimizer's extra arguments, with all functions averaged, and arrays that may differ between workers.

    Without checked types nothing says whether a value differs. The mean of equal ones is the same again. `weight` is
    that of this worker's gradient, and so of its results.

    Raises:
      ValueError: `weight` has a number for each leaf, and there are functions.
    """
    typed = has_types(axis)
    comm = over(axis)
    functions = [name for name, x in extra_args.items() if callable(x)]
    if functions and weight is not None and weight.ndim:
        raise ValueError(
            f"weights for single leaves of the gradient (a tree as examples=) do not tell how much this worker's "
            f"{functions[0]}= counts: pass one number as examples="
        )

    # Concrete arrays are part of the program, which is one for all workers.
    def is_unknown(x: Any) -> bool:
        return isinstance(x, Tracer) and not typed and jnp.issubdtype(x.dtype, jnp.floating)

    has_means = bool(functions) or any(map(is_unknown, jax.tree.leaves(extra_args, is_leaf=is_mark)))
    factor = weight_of(weight, comm)[0] if has_means and weight is not None and not weight.ndim else None

    def average_leaf(x: Any) -> Any:
        if not is_unknown(x):
            return x
        return _wide_mean(x if factor is None else scale_leaves(x, factor), comm)

    return {
        name: average_function(x, axis, f"{name}=", factor)
        if callable(x)
        else jax.tree.map(average_leaf, x, is_leaf=is_mark)
        for name, x in extra_args.items()
    }


def check_functions(extra_args: dict[str, Any], params: PyTree, axis: AxisNames, *, is_weighted: bool) -> None:
    """Checks the functions that an optimizer after `all_reduce` will call, which nothing can average there.

    Before the first call: a search along a line would run for different numbers of rounds on different workers.
    `is_weighted` tells whether workers count differently in this step.
    """
    for name in CALLED:
        known = getattr(extra_args.get(name), "__dict__", {})
        if is_weighted and known.get("is_averaged") and not known.get("is_weighted"):
            raise ValueError(
                f"the gradients of this step are weighted, and {name}= is a mean in which all workers count alike: "
                f"pass examples= and active= there too, {name}=jd.transforms.averaged(f, examples=...)"
            )
    if params is None or not axis_tuple(axis) or _under_vmap(axis):
        return
    for name, arguments in CALLED.items():
        f = extra_args.get(name)
        if not callable(f) or getattr(f, "is_averaged", False):
            continue
        known = inspect.signature(f).parameters
        call = partial(f, **{key: x for key, x in extra_args.items() if key in known})
        if has_types(axis):
            found = jax.eval_shape(lambda p, call=call, rest=arguments: call(p, *rest), params)
            kinds = [x.manual_axis_type for x in jax.tree.leaves(found)]
            differs = any(kind and kind.varying & set(axis_tuple(axis)) for kind in kinds)
            reason = f"returns other values on each worker of axis {axis!r}"
        else:
            # The mean of `grad_fn` is not differentiated.
            differs = name != "grad_fn" and communicates_over(lambda p, call=call: call(p), params, axis)
            reason = 'averages a loss, whose gradient is that of this worker alone with check="values"'
        if differs:
            raise ValueError(
                f"{name}= {reason}, but an optimizer after all_reduce must see the same on all: pass "
                f"{name}=jd.transforms.averaged(f), with f of this worker's batch alone"
            )


def refuse_communication(extra_args: dict[str, Any], axis: AxisNames) -> dict[str, Any]:
    """The extra arguments, whose functions raise if they communicate over this axis.

    An optimizer of one worker calls them as often as it likes: a collective in them would wait for ever.
    """
    return {name: _raise_on_collectives(x, axis, name) if callable(x) else x for name, x in extra_args.items()}


def _raise_on_collectives(f: Callable[..., Any], axis: AxisNames, name: str) -> Callable[..., Any]:
    @functools.wraps(f)
    def call(params, *args, **kwargs):
        if communicates_over(lambda p: f(p, *args, **kwargs), params, axis):
            raise ValueError(
                f"{name}= communicates over axis {axis!r}, whose workers take steps of their own here, each with its "
                "own model: some would call it more often than others, and wait for them for ever. Pass the function "
                f"of this worker's batch alone, {name}=f without pmean and without averaged"
            )
        return f(params, *args, **kwargs)

    return call


def communicates_over(f: Callable[[PyTree], Any], params: PyTree, axis: AxisNames) -> bool:
    """Returns whether a function has a collective over any of these axes."""
    return any(name in axis_tuple(axis) for name in _axes_in(jax.make_jaxpr(f)(params)))


def _axes_in(closed: Any) -> Iterator[str]:
    """The axes of all collectives of a trace."""
    for equation in closed.jaxpr.eqns:
        # A worker's number is known without asking the others, and a cast changes types alone.
        if equation.primitive.name not in ("axis_index", *CASTS):
            names = equation.params.get("axes", equation.params.get("axis_name", ()))
            yield from (x for x in (names if isinstance(names, tuple) else (names,)) if isinstance(x, str))
        for body in inner_jaxprs(equation):
            yield from _axes_in(body)


def _call(
    f: Callable[[PyTree], Any], params: PyTree, axis: AxisNames, name: str, factor: Array | None = None
) -> PyTree:
    comm, typed = over(axis), has_types(axis)
    if factor is not None:
        f = partial(_call_if_counted, f, factor)
    if typed:
        # Local first, so that the gradient of a plain `jax.grad` inside is this worker's and not the sum of all.
        local = comm.varying(params)
        out = f(local)
        differing = [x for x in jax.tree.leaves(out) if varying_axes(x) & set(axis_tuple(axis))]
        if differing and communicates_over(f, local, axis):
            raise ValueError(
                f"{name} returns values that differ between workers of axis {axis!r} although it communicates: "
                "average its results, value_fn=lambda p: jax.lax.pmean(loss_fn(p, batch), 'data') and "
                "grad_fn=lambda p, i: jax.lax.pmean(jd.local_value_and_grad(loss_fn)(p, batch)[1], 'data'), or leave "
                "all collectives out: this worker's results are averaged then"
            )
    else:
        out = f(_with_mean_gradient(params, comm))

    def average_leaf(x: Any) -> Any:
        x = jnp.asarray(x)
        if typed and not varying_axes(x) & set(axis_tuple(axis)):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return _wide_mean(x if factor is None else scale_leaves(x, factor), comm)
        if typed:
            raise ValueError(
                f"{name} returns {x.dtype} values that differ between workers of axis {axis!r}, and only floating ones "
                "have a mean: leave them out, or make them equal with jax.lax.psum or pmax"
            )
        return x

    return jax.tree.map(average_leaf, out)


def _call_if_counted(f: Callable[[PyTree], Any], factor: Array, params: PyTree) -> Any:
    """`f(params)`, without a derivative on workers that do not count, of which NaN would remain in a product with 0."""

    def stop_unless_counted(x: Any) -> Any:
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.where(factor > 0, x, jax.lax.stop_gradient(x)) if is_float else x

    return f(jax.tree.map(stop_unless_counted, params))


def _under_vmap(axis: AxisNames) -> bool:
    return not mesh_axes_being_mapped().issuperset(axis_tuple(axis))


def has_types(axis: AxisNames) -> bool:
    """Returns whether values are typed as equal or different on the workers of these axes."""
    return types_are_checked(axis_tuple(axis))


def _wide_mean(x: Array, comm: Comm) -> Array:
    """The mean in float32 or better, which has a derivative everywhere."""
    return comm.mean(comm.varying(x.astype(working_dtype(x.dtype)))).astype(x.dtype)


def _with_mean_gradient(params: PyTree, comm: Comm) -> PyTree:
    """The same parameters, for which the gradient of what is computed from them is the mean over workers.

    Without types the transpose of a sum over workers is a sum: a worker's gradient is that of all workers' results for
    its own parameters. Parameters are equal on all, so that the mean of these gradients is that of one result.
    """

    @jax.custom_jvp
    def identity(x):
        return x

    # The mean is its own transpose.
    identity.defjvp(lambda primals, tangents: (primals[0], _wide_mean(tangents[0], comm)))
    return jax.tree.map(lambda x: identity(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
