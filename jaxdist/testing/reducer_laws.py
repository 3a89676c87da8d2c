"""What every reducer promises, checked in simulation: no mesh, no optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._core.types import AxisNames, PRNGKeyArray, PyTree, State
from ..comm.base import Comm
from ..comm.groups import alone, nested
from ..comm.over import over
from ..reducers.base import Reducer, feedback_form, held_by
from ..reducers.feedback import error_feedback
from ..runtime.simulate import simulate
from ..state.marks import PerWorker, named
from ..state.placement import init_state
from ..wire.shards import length

LIKE = {
    "matrix": jax.ShapeDtypeStruct((8, 6), jnp.float32),
    "vector": jax.ShapeDtypeStruct((5,), jnp.float32),
    "scalar": jax.ShapeDtypeStruct((), jnp.float32),
    "empty": jax.ShapeDtypeStruct((0, 4), jnp.float32),
    "missing": None,
}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
DRAWS = 200


class _Group(NamedTuple):
    """Whom to simulate: so many workers along these axes; and one worker by itself, with as many levels."""

    workers: int | Mapping[str, int]
    axis: AxisNames
    count: int
    single: Comm


class _Run(NamedTuple):
    """What went in, `[steps, W, *s]`, the means `[steps, *s]`, what workers contributed, and the state at the end.

    `repaid`, like the means, is by how much each step lowered what servers hold.
    """

    inputs: PyTree
    means: PyTree
    owns: PyTree
    repaid: PyTree
    state: State

    def off(self) -> PyTree:
        """What law "telescoping" says is zero."""
        return jax.tree.map(lambda m, own, r: m - (own.mean(1) + r), self.means, self.owns, self.repaid)


def assert_reducer_laws(
    reducer: Reducer,
    *,
    workers: int | Mapping[str, int] = 4,
    like: PyTree | None = None,
    steps: int = 3,
    tolerance: float = 1e-5,
    dtypes: Sequence[DTypeLike] = DTYPES,
    key: PRNGKeyArray | None = None,
) -> None:
    """Asserts that a reducer keeps its promises, for simulated workers with Gaussian updates.

    `init` needs no workers and works on shapes alone. State keeps its tree, shapes and dtypes; unmarked state and the
    mean are agreed; the mean has the shapes and dtypes of the updates, in half precision too, and the pieces of a
    reduce-scatter form those of `Sharded(leaf, multiple=8)`. The step is traced once.
    Law "exact": `mean == comm.mean(own)`, and a single worker gets back its own contribution. Law "telescoping": the
    same plus what servers `held` before and less what they hold after. Law "unbiased": the same on average, over 200
    steps and up to five standard errors. Zeros give finite means. Where the reducer may stand inside error feedback and
    is not merely unbiased, the outputs telescope: the sum of the means, the mean residual and what servers hold make up
    the sum of the mean updates.

    Args:
      reducer: the reducer under test.
      workers: how many, or a mapping from axis name to number, slow links first, for reducers of two levels.
      like: the tree of shapes to reduce, in float32; by default a matrix, a vector, a scalar, an empty leaf and a
        missing one.
      steps: how many steps state is carried over.
      tolerance: relative to the largest update. Sums in half precision need more: 2e-3 for float16.
      dtypes: of the updates, for the laws on shapes and dtypes; the others are checked in float32.
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

    _check_types(reducer, like, group.single, dtypes)
    batches = [_gaussian(like, group.count, jax.random.fold_in(key, number)) for number in range(steps)]
    scale = max((float(jnp.max(jnp.abs(x), initial=0.0)) for x in jax.tree.leaves(batches)), default=0.0)
    run_on = _simulated(reducer, group, like)
    run = run_on(batches)
    _law("finite updates give finite means", _finite(run.means), "a mean is not finite")
    zeros = jax.tree.map(jnp.zeros_like, batches[0])
    _law("zeros give finite means", _finite(run_on([zeros]).means), "the mean of zeros is not finite")
    _check_law(reducer, run, lambda: run_on([batches[0]] * DRAWS), tolerance * scale)
    if reducer.law == "exact":
        mine = jax.tree.map(lambda x: x[0], batches[0])
        single, _ = jax.jit(lambda x: reducer.reduce(x, reducer.init(like), group.single))(mine)
        _close("one worker: mean == own", single.mean, single.own, tolerance * scale)

    try:
        form = feedback_form(reducer)
    except ValueError:
        return  # it says itself that it may not stand inside error feedback
    if form.law in ("exact", "telescoping"):
        run = _simulated(error_feedback(reducer), group, like)(batches)
        delivered = jax.tree.map(
            lambda means, repaid, e: (means - repaid).sum(0) + e,
            run.means,
            run.repaid,
            _mean(run.state.residual.value, 0),
        )
        expected = jax.tree.map(lambda x: x.sum(0), _mean(run.inputs, 1))
        _close("feedback telescopes", delivered, expected, tolerance * scale * steps)


def _check_law(reducer: Reducer, run: _Run, many: Callable[[], _Run], tolerance: float) -> None:
    if reducer.law == "exact":
        _close("exact: mean == comm.mean(own)", run.means, _mean(run.owns, 1), tolerance)
    if reducer.law == "telescoping":
        _law("telescoping: says what is held", reducer.held is not None, "the reducer has no `held`")
        off = run.off()
        _close("telescoping: mean == comm.mean(own) + repaid", off, jax.tree.map(jnp.zeros_like, off), tolerance)
    if reducer.law == "unbiased":
        for path, off in jax.tree_util.tree_flatten_with_path(many().off())[0]:
            noise = off.astype(jnp.float32).reshape(DRAWS, -1)
            # The mean of n draws is off by the n-th part of their variance; 25 is five standard errors of one entry.
            bound = 25 * float(jnp.sum(jnp.square(noise))) / DRAWS**2 + tolerance**2
            bias = float(jnp.sum(jnp.square(noise.mean(0))))
            _law("unbiased", bias <= bound, f"{named('the leaf', path)} is off by {bias**0.5:.3g} on average")


def _law(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(f"law '{name}' broken: {detail}")


def _close(name: str, left: PyTree, right: PyTree, tolerance: float) -> None:
    def far(path, a, b):
        difference = float(jnp.max(jnp.abs(a.astype(b.dtype) - b), initial=0.0))
        _law(name, difference <= tolerance, f"{named('the leaf', path)} differs by {difference:.3g}")

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


def _check_types(reducer: Reducer, like: PyTree, single: Comm, dtypes: Sequence[DTypeLike]) -> None:
    """Everything that can be seen without computing."""
    for dtype in dtypes:
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
        if reducer.scatter is not None:
            _check_pieces(reducer.scatter, updates, single)


def _check_pieces(scatter: Callable[[], Reducer], updates: PyTree, single: Comm) -> None:
    """The reduce-scatter form of a single worker."""
    try:
        form = scatter()
        before = jax.eval_shape(form.init, updates)
    except ValueError:
        return  # it says itself that there is none
    reduced, after = jax.eval_shape(
        lambda x, state: form.reduce(x, state, single, step=0, learning_rate=0.1), updates, before
    )
    pieces = jax.tree.map(lambda x: jax.ShapeDtypeStruct((length(math.prod(x.shape), 1),), x.dtype), updates)
    _law("the pieces are cut like Sharded", _same(_shapes(reduced.mean), pieces), f"{pieces} came as {reduced.mean}")
    _law("the state of the reduce-scatter form keeps its types", _same(after, before), f"{before} became {after}")


def _simulated(reducer: Reducer, group: _Group, like: PyTree) -> Callable[[list[PyTree]], _Run]:
    """Runs the reducer in simulation from its initial state, one step for each batch `[W, *s]`."""
    traces = []

    def step(state, batch):
        traces.append(None)
        updates = jax.tree.map(lambda x: x[0], batch)
        old, comm = state["kept"]["reducer"], over(group.axis)
        reduced, kept = reducer.reduce(updates, old, comm)
        repaid = jax.tree.map(jnp.subtract, *(held_by(reducer, which, updates, comm) for which in (old, kept)))
        return {"kept": {"reducer": kept}, "mean": reduced.mean, "own": reduced.own, "repaid": repaid}, {}

    def make_state():
        initial = reducer.init(like)
        updates = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        # `mean` is unmarked: `simulate` refuses what may differ between workers. The reducer's state lies two levels
        # deep, since the marks around whole fields of a state are taken off.
        return {"kept": {"reducer": initial}, "mean": updates, "own": PerWorker(updates), "repaid": updates}

    simulated = simulate(step, group.workers, axis=group.axis)
    first = init_state(make_state, group.workers, axis=group.axis)

    def run(batches):
        state, found = first, []
        for batch in batches:
            try:
                state, _ = simulated(state, batch)
            except ValueError as error:
                raise AssertionError(f"law 'the mean and unmarked state are agreed' broken: {error}") from error
            found.append((state["mean"], state["own"].value, state["repaid"]))
        _law("traced once", len(traces) == 1, f"{len(traces)} traces")
        means, owns, repaid = _stack(found)
        return _Run(_stack(batches), means, owns, repaid, state["kept"]["reducer"])

    return run


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
