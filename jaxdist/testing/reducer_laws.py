"""Laws of reducers, checked in simulation, without a mesh or an optimizer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._core.checks import check_count
from .._core.types import AxisNames, PRNGKeyArray, PyTree, State
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm, alone, nested
from ..comm.over import over
from ..reducers.error_feedback import error_feedback
from ..reducers.reducer import Extras, Law, Reducer, contraction_of, shards_of
from ..runtime.simulate import simulate
from ..state.marks import PerWorker, Sharded, is_mark, name_leaf
from ..state.placement import init_state
from ..wire.buffers import shard_length
from .compressor_laws import ENTRIES, NOT_FINITE

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
    """The workers to simulate along these axes, and the group of a single worker with as many levels."""

    workers: int | Mapping[str, int]
    axis: AxisNames
    count: int
    single: Comm


class _Run(NamedTuple):
    """Inputs and contributions `[steps, W, *s]`, the means `[steps, *s]`, and the last state.

    `server` has, for each step, what the servers hold after it: the sum of the entries of the server residuals, and
    the sum of the largest magnitudes of each.
    """

    inputs: PyTree
    means: PyTree
    owns: PyTree
    server: list[tuple[float, float]]
    state: State

    def missing(self) -> PyTree:
        """What each mean lacks of the mean contribution: zero by law "exact"."""
        return jax.tree.map(lambda mean, own: own.mean(1) - mean, self.means, self.owns)


def assert_reducer_laws(
    reducer: Reducer,
    *,
    workers: int | Mapping[str, int] = 4,
    like: PyTree | None = None,
    steps: int = 3,
    tolerance: float = 1e-5,
    dtypes: Sequence[DTypeLike] = DTYPES,
    key: PRNGKeyArray | None = None,
    loses_nan: bool = False,
) -> None:
    """Asserts that a reducer keeps its laws, for simulated workers with Gaussian updates.

    - *Shapes*: `init` needs no workers and works on shapes alone. State keeps its tree, shapes and dtypes, the mean
      those of the updates; both are replicated unless marked. Shards are those of `Sharded(leaf, multiple=8)`; one
      trace.
    - *"mean"*: `mean == comm.mean(updates)`, without state.
    - *"exact"*: `mean == comm.mean(own)`, and a single worker gets back its own contribution.
    - *"telescoping"*: all that the means have lacked so far is in the server residuals, the `Sharded` leaves of the
      state; the totals over all entries are equal, and no entry lacks more than the residuals hold.
    - *"unbiased"*: the mean lacks nothing on average, over 200 steps, within five standard errors.
    - *Numbers*: zeros give finite means; NaN or infinity of one worker gives a mean that is not finite, in error
      feedback too (for a matrix or vector of 5,000 entries in `like`).
    - *Error feedback*, if it accepts the reducer and the law is not merely "unbiased": the sum of the means, the mean
      residual and the server residuals make up the sum of the mean updates.

    Args:
      reducer: the reducer under test.
      workers: the number of workers, or a mapping from axis name to number, slow links first, for two levels.
      like: the tree of shapes to reduce, in float32; by default a matrix, a vector, a scalar, an empty leaf and a
        missing one.
      steps: the number of consecutive steps.
      tolerance: relative to the largest update. Sums in half precision need more: 2e-3 for float16.
      dtypes: of the updates, for the laws on shapes and dtypes; the others are checked in float32.
      key: of the updates.
      loses_nan: true for a reducer that does not keep NaN and infinity, as its docstring should say.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> assert_reducer_laws(jd.compressed(jd.compressors.scaled_sign()), like=jnp.zeros(37), dtypes=["float32"])
    """
    check_count("steps", steps, 1)
    like = LIKE if like is None else like
    key = jax.random.key(0) if key is None else key
    if isinstance(workers, Mapping):
        group = _Group(workers, tuple(workers), math.prod(workers.values()), nested(alone(), alone()))
    else:
        group = _Group(workers, "data", workers, alone())

    _check_types(reducer, like, group.single, dtypes)
    batches = [_gaussian(like, group.count, jax.random.fold_in(key, number)) for number in range(steps)]
    scale = max((float(largest_entry(jnp.abs(x), initial=0.0)) for x in jax.tree.leaves(batches)), default=0.0)
    run_on = _make_runner(reducer, group, like)
    run = run_on(batches)
    _law("finite updates give finite means", _finite(run.means), "a mean is not finite")
    zeros = jax.tree.map(jnp.zeros_like, batches[0])
    _law("zeros give finite means", _finite(run_on([zeros]).means), "the mean of zeros is not finite")
    _check_law(reducer, run, lambda: run_on([batches[0]] * DRAWS), tolerance * scale)
    if reducer.law <= Law.EXACT:
        # A group of one worker, without simulation.
        mine = jax.tree.map(lambda x: x[0], batches[0])
        extras = Extras(params=_parameters(mine))
        single, _ = jax.jit(lambda x: reducer.reduce(x, reducer.init(like), group.single, extras))(mine)
        _close("one worker: mean == own", single.mean, single.own, tolerance * scale)

    if not loses_nan:
        _check_not_finite(reducer, group, like)
    try:
        form = contraction_of(reducer)
    except ValueError:
        return  # error feedback refuses it
    if form.law <= Law.TELESCOPING:
        # Over all steps: mean updates - means - residuals of the workers = residuals of the servers.
        run = _make_runner(error_feedback(reducer), group, like)(batches)
        undelivered = jax.tree.map(
            lambda x, mean, e: (x.mean(1) - mean).sum(0) - e, run.inputs, run.means, _mean(run.state.residual.value, 0)
        )
        _check_held("feedback telescopes", undelivered, run.server[-1], tolerance * scale * steps)
    if not loses_nan:
        _check_not_finite(error_feedback(reducer), group, like)


def _check_law(reducer: Reducer, run: _Run, run_many: Callable[[], _Run], tolerance: float) -> None:
    if reducer.law == Law.MEAN:
        _law("mean: no state", not jax.tree.leaves(run.state), f"the state is {run.state}")
        _close("mean: mean == comm.mean(updates)", run.means, _mean(run.inputs, 1), tolerance)
    if reducer.law <= Law.EXACT:
        _close("exact: mean == comm.mean(own)", run.means, _mean(run.owns, 1), tolerance)
    if reducer.law == Law.TELESCOPING:
        # What all means until each step lack of the mean contributions.
        so_far = jax.tree.map(lambda x: jnp.cumsum(x, axis=0), run.missing())
        for step, held in enumerate(run.server):
            lacking = jax.tree.map(lambda x, step=step: x[step], so_far)
            _check_held("telescoping: server residuals have what the means lack", lacking, held, tolerance)
    if reducer.law == Law.UNBIASED:
        for path, missing in jax.tree_util.tree_flatten_with_path(run_many().missing())[0]:
            noise = missing.astype(jnp.float32).reshape(DRAWS, -1)
            # The mean of n draws is off by the n-th part of their variance; 25 is five standard errors of one entry.
            bound = 25 * float(jnp.sum(jnp.square(noise))) / DRAWS**2 + tolerance**2
            bias = float(jnp.sum(jnp.square(noise.mean(0))))
            _law("unbiased", bias <= bound, f"{name_leaf('the leaf', path)} is off by {bias**0.5:.3g} on average")


def _check_not_finite(reducer: Reducer, group: _Group, like: PyTree) -> None:
    """Checks that the mean shows what is not finite, in the second step: the first one is often exact."""
    leaves, structure = jax.tree.flatten(like)
    # By the number of dimensions: matrices and vectors may go different ways.
    found = {min(len(leaf.shape), 2): i for i, leaf in reversed(list(enumerate(leaves))) if math.prod(leaf.shape) > 1}
    # Nothing in place of the others, whose mean may be what it likes.
    kept: list[jax.ShapeDtypeStruct | None] = [None] * len(leaves)
    for dimensions, i in found.items():
        shape = (ENTRIES,) if dimensions == 1 else (100, ENTRIES // 100)
        kept[i] = jax.ShapeDtypeStruct(shape, leaves[i].dtype)
    like = structure.unflatten(kept)
    leaves, structure = jax.tree.flatten(like)
    run_on = _make_runner(reducer, group, like)
    clean = _gaussian(like, group.count, jax.random.key(0))
    for value in NOT_FINITE:
        for i, leaf in enumerate(leaves):
            batch = jax.tree.leaves(clean)
            # Of the last worker, whose processes tell apart what wins.
            batch[i] = batch[i].at[(-1, *(-2 for _ in leaf.shape))].set(value)
            mean = jax.tree.map(lambda x: x[1], run_on([clean, structure.unflatten(batch)]).means)
            detail = f"{value} among the entries of a leaf {leaf.shape} of one worker"
            _law("what is not finite gives a mean that is not", not _finite(mean), detail)


def _check_held(name: str, lacking: PyTree, held: Sequence[float], tolerance: float) -> None:
    """Checks that what the means lack is what the server residuals hold.

    Only the reducer knows which entry of a residual belongs to which entry of a leaf, so compare the totals; and the
    largest, which bounds every entry independently of the number of steps.
    """
    entries = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(lacking)]
    total = float(sum(x.sum() for x in entries))
    largest = max((float(np.max(np.abs(x), initial=0)) for x in entries), default=0.0)
    rounding = tolerance * max(sum(x.size for x in entries), 1)
    _law(name, abs(total - held[0]) <= rounding, f"they lack {total:.3g} in total, and servers hold {held[0]:.3g}")
    _law(name, largest <= held[1] + tolerance, f"an entry lacks {largest:.3g}, and servers hold up to {held[1]:.3g}")


def _server_totals(state: State) -> tuple[float, float]:
    """The sum of all entries of the server residuals, and the sum of the largest magnitude of each residual."""
    marked = jax.tree.leaves(state, is_leaf=is_mark)
    residuals = [np.asarray(mark.value, np.float64) for mark in marked if isinstance(mark, Sharded)]
    return float(sum(x.sum() for x in residuals)), float(sum(np.max(np.abs(x), initial=0) for x in residuals))


def _law(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(f"law '{name}' broken: {detail}")


@contextmanager
def _noting(name: str) -> Iterator[None]:
    """Adds the name of a law to what the reducer raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"law '{name}' broken: the reducer raises this")
        raise


def _close(name: str, left: PyTree, right: PyTree, tolerance: float) -> None:
    def far(path, a, b):
        difference = float(largest_entry(jnp.abs(a.astype(b.dtype) - b), initial=0.0))
        _law(name, difference <= tolerance, f"{name_leaf('the leaf', path)} differs by {difference:.3g}")

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
    """Checks shapes, dtypes and the structure of the state, without computing."""
    for dtype in dtypes:
        updates = jax.tree.map(lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype), like)
        try:
            before = jax.eval_shape(reducer.init, updates)
        except (NameError, ValueError) as error:  # from JAX, and from `comm.over`, where an axis is not bound
            raise AssertionError(f"law 'init needs shapes only and never communicates' broken: {error}") from error
        with _noting("the mean is like the updates"):
            reduced, after = jax.eval_shape(
                lambda x, state: reducer.reduce(x, state, single, _extras_of(x)), updates, before
            )
        _law("the mean is like the updates", _same(_shapes(reduced.mean), updates), f"{updates} gave {reduced.mean}")
        _law("state keeps its tree, shapes and dtypes", _same(after, before), f"{before} became {after}")
        if reducer.forms.shards is not None:
            _check_shards(shards_of(reducer), updates, single)


def _extras_of(updates: PyTree) -> Extras:
    return Extras(0, 0.1, params=_parameters(updates))


def _parameters(updates: PyTree) -> PyTree:
    """Parameters of which bfloat16 sees about half of the Gaussian updates: those beyond one half."""
    return jax.tree.map(lambda x: jnp.full(x.shape, 128, x.dtype), updates)


def _check_shards(form: Reducer, updates: PyTree, single: Comm) -> None:
    """Checks the reduce-scatter form of a single worker."""
    try:
        before = jax.eval_shape(form.init, updates)
    except ValueError:
        return  # it refuses to be set up
    with _noting("shards are split like Sharded"):
        reduced, after = jax.eval_shape(lambda x, state: form.reduce(x, state, single, _extras_of(x)), updates, before)
    shards = jax.tree.map(lambda x: jax.ShapeDtypeStruct((shard_length(math.prod(x.shape), 1),), x.dtype), updates)
    _law("shards are split like Sharded", _same(_shapes(reduced.mean), shards), f"{shards} came as {reduced.mean}")
    _law("the state of the reduce-scatter form keeps its types", _same(after, before), f"{before} became {after}")


def _make_runner(reducer: Reducer, group: _Group, like: PyTree) -> Callable[[list[PyTree]], _Run]:
    """Runs the reducer in simulation from its initial state, one step for each batch `[W, *s]`."""
    traces = []

    def step(state, batch):
        traces.append(None)
        updates = jax.tree.map(lambda x: x[0], batch)
        extras = Extras(params=_parameters(updates))
        reduced, kept = reducer.reduce(updates, state["kept"]["reducer"], over(group.axis), extras)
        return {"kept": {"reducer": kept}, "mean": reduced.mean, "own": reduced.own}, {}

    def make_state():
        initial = reducer.init(like)
        updates = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        # `mean` is unmarked: `simulate` refuses what may differ between workers. The reducer's state is two levels
        # deep, since the marks around whole fields of a state are taken off.
        return {"kept": {"reducer": initial}, "mean": updates, "own": PerWorker(updates)}

    simulated = simulate(step, group.workers, axis=group.axis)
    first = init_state(make_state, group.workers, axis=group.axis)

    def run(batches):
        state, found, server = first, [], []
        for batch in batches:
            try:
                state, _ = simulated(state, batch)
            except ValueError as error:
                raise AssertionError(f"law 'the mean and unmarked state are agreed' broken: {error}") from error
            found.append((state["mean"], state["own"].value))
            server.append(_server_totals(state["kept"]["reducer"]))
        _law("traced once", len(traces) == 1, f"{len(traces)} traces")
        means, owns = _stack(found)
        return _Run(_stack(batches), means, owns, server, state["kept"]["reducer"])

    return run


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
