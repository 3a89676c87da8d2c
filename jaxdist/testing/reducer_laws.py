"""What every reducer promises, checked in simulation: no mesh, no optimizer."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._marks import PerWorker
from .._typing import AxisNames, PRNGKeyArray, PyTree, State
from ..comm import Comm, alone, nested, over
from ..parallel import simulate
from ..placement import init_state
from ..reducers.base import Reducer, feedback_form
from ..reducers.feedback import error_feedback

LIKE = {
    "matrix": jax.ShapeDtypeStruct((8, 6), jnp.float32),
    "vector": jax.ShapeDtypeStruct((5,), jnp.float32),
    "scalar": jax.ShapeDtypeStruct((), jnp.float32),
    "empty": jax.ShapeDtypeStruct((0, 4), jnp.float32),
    "missing": None,
}


class _Group(NamedTuple):
    """Whom to simulate: so many workers along these axes; and one worker by itself, with as many levels."""

    workers: int | Mapping[str, int]
    axis: AxisNames
    count: int
    single: Comm


class _Run(NamedTuple):
    """What went in, `[steps, W, *s]`, the means `[steps, *s]`, what workers contributed, and the state at the end."""

    inputs: PyTree
    means: PyTree
    owns: PyTree
    state: State


def assert_reducer_laws(
    reducer: Reducer,
    *,
    workers: int | Mapping[str, int] = 4,
    like: PyTree | None = None,
    steps: int = 3,
    tolerance: float = 1e-5,
    key: PRNGKeyArray | None = None,
) -> None:
    """Asserts that a reducer keeps its promises, for simulated workers with Gaussian updates.

    `init` needs no workers and works on shapes alone. State keeps its tree, shapes and dtypes; unmarked state and the
    mean are agreed; the mean has the shapes and dtypes of the updates, in half precision too. The step is traced once.
    Law "exact": `mean == comm.mean(own)`. A single worker gets back its own contribution. Zeros give finite means.
    Where the reducer may stand inside error feedback, the outputs telescope: the sum of the means and the mean residual
    make up the sum of the mean updates.

    Args:
      reducer: the reducer under test.
      workers: how many, or a mapping from axis name to number, slow links first, for reducers of two levels.
      like: the tree of shapes to reduce, in float32; by default a matrix, a vector, a scalar, an empty leaf and a
        missing one.
      steps: how many steps state is carried over.
      tolerance: relative to the largest update. Sums in half precision need more: 2e-3 for float16.
      key: of the updates.

    Raises:
      AssertionError: naming the law.

    Example:
      >>> import jaxdist as jd
      >>> assert_reducer_laws(jd.compressed(jd.top_k(0.5)), steps=2)
    """
    like = LIKE if like is None else like
    key = jax.random.key(0) if key is None else key
    if isinstance(workers, Mapping):
        group = _Group(workers, tuple(workers), math.prod(workers.values()), nested(alone(), alone()))
    else:
        group = _Group(workers, "data", workers, alone())

    _check_types(reducer, like, group.single)
    batches = [_gaussian(like, group.count, jax.random.fold_in(key, number)) for number in range(steps)]
    scale = max((float(jnp.max(jnp.abs(x), initial=0.0)) for x in jax.tree.leaves(batches)), default=0.0)
    run_on = _simulated(reducer, group, like)
    run = run_on(batches)
    _law("finite updates give finite means", _finite(run.means), "a mean is not finite")
    zeros = jax.tree.map(jnp.zeros_like, batches[0])
    _law("zeros give finite means", _finite(run_on([zeros]).means), "the mean of zeros is not finite")
    if reducer.law == "exact":
        _close("exact: mean == comm.mean(own)", run.means, _mean(run.owns, 1), tolerance * scale)
        mine = jax.tree.map(lambda x: x[0], batches[0])
        single, _ = jax.jit(lambda x: reducer.reduce(x, reducer.init(like), group.single))(mine)
        _close("one worker: mean == own", single.mean, single.own, tolerance * scale)

    try:
        form = feedback_form(reducer)
    except ValueError:
        return  # it says itself that it may not stand inside error feedback
    if form.law == "exact":
        run = _simulated(error_feedback(reducer), group, like)(batches)
        delivered = jax.tree.map(lambda means, e: means.sum(0) + e, run.means, _mean(run.state.residual.value, 0))
        expected = jax.tree.map(lambda x: x.sum(0), _mean(run.inputs, 1))
        _close("feedback telescopes", delivered, expected, tolerance * scale * steps)


def _law(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(f"law '{name}' broken: {detail}")


def _close(name: str, left: PyTree, right: PyTree, tolerance: float) -> None:
    def far(path, a, b):
        difference = float(jnp.max(jnp.abs(a.astype(b.dtype) - b), initial=0.0))
        _law(name, difference <= tolerance, f"{jax.tree_util.keystr(path)} differs by {difference:.3g}")

    jax.tree_util.tree_map_with_path(far, left, right)


def _finite(tree: PyTree) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))


def _mean(tree: PyTree, dimension: int) -> PyTree:
    return jax.tree.map(lambda x: x.mean(dimension), tree)


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tree)


def _same(left: PyTree, right: PyTree) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and jax.tree.leaves(left) == jax.tree.leaves(right)


def _gaussian(like: PyTree, count: int, key: PRNGKeyArray) -> PyTree:
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, max(len(leaves), 1))
    return structure.unflatten(
        [jax.random.normal(key, (count, *leaf.shape), leaf.dtype) for key, leaf in zip(keys, leaves)]
    )


def _check_types(reducer: Reducer, like: PyTree, single: Comm) -> None:
    """Everything that can be seen without computing."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        updates = jax.tree.map(lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype), like)
        try:
            before = jax.eval_shape(reducer.init, updates)
        except (NameError, ValueError) as error:  # from JAX, and from `comm.over`, where an axis is not bound
            raise AssertionError(f"law 'init needs shapes only and never communicates' broken: {error}") from error
        reduced, after = jax.eval_shape(
            lambda x, state: reducer.reduce(x, state, single, step=0, learning_rate=0.1), updates, before
        )
        _law("the mean is like the updates", _same(_shapes(reduced.mean), updates), f"{updates} gave {reduced.mean}")
        _law("state keeps its tree, shapes and dtypes", _same(after, before), f"{before} became {after}")


def _simulated(reducer: Reducer, group: _Group, like: PyTree) -> Callable[[list[PyTree]], _Run]:
    """Runs the reducer in simulation from its initial state, one step for each batch `[W, *s]`."""
    traces = []

    def step(state, batch):
        traces.append(None)
        updates = jax.tree.map(lambda x: x[0], batch)
        reduced, kept = reducer.reduce(updates, state["kept"]["reducer"], over(group.axis))
        return {"kept": {"reducer": kept}, "mean": reduced.mean, "own": reduced.own}, {}

    def make_state():
        initial = reducer.init(like)
        updates = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        reduced = jax.tree.map(jnp.zeros_like, reducer.reduce(updates, initial, group.single)[0])
        # `mean` is unmarked: `simulate` refuses what may differ between workers. The reducer's state lies two levels
        # deep, since the marks around whole fields of a state are taken off.
        return {"kept": {"reducer": initial}, "mean": reduced.mean, "own": PerWorker(reduced.own)}

    simulated = simulate(step, group.workers, axis=group.axis)
    first = init_state(make_state, group.workers, axis=group.axis)

    def run(batches):
        state, means, owns = first, [], []
        for batch in batches:
            try:
                state, _ = simulated(state, batch)
            except ValueError as error:
                raise AssertionError(f"law 'the mean and unmarked state are agreed' broken: {error}") from error
            means.append(state["mean"])
            owns.append(state["own"].value)
        _law("traced once", len(traces) == 1, f"{len(traces)} traces")
        return _Run(_stack(batches), _stack(means), _stack(owns), state["kept"]["reducer"])

    return run


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
