"""Parts of a tree that are reduced one by one, with a bound on how many are in flight."""

from collections.abc import Sequence

from jax import lax

from .._core.order import order_after
from .._core.trees import fold_keys
from .._core.types import Array, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..state.marks import LeafOrder, record_order
from .messages import as_generator, run
from .reducer import Extras, Reduced, Reducer, Use, check_use


def check_parts(what: str, reducer: Reducer) -> None:
    """Raises `ValueError` for a reducer that cannot reduce parts of leaves."""
    check_use(Use.PARTS, reducer, what)


def init_parts(
    reducer: Reducer, parts: Sequence[PyTree[Like]], *, orders: Sequence[LeafOrder] = ()
) -> tuple[State, ...]:
    """Returns the state of the reducer for each part; `orders` has the leaves of each if these are vectors."""
    # Parts must not share their draws.
    states = tuple(fold_keys(reducer.init(part), i) for i, part in enumerate(parts))
    if not orders:
        return states
    return tuple(record_order(state, order) for state, order in zip(states, orders, strict=True))


def reduce_parts(
    reducer: Reducer, parts: Sequence[Updates], state: State, comm: Comm, extras: Extras, *, window: int | None = None
) -> tuple[list[Reduced], tuple[State, ...]]:
    """Reduces each part by collectives of its own; with a `window`, at most that many vectors are in flight."""
    reduced, states = [], []
    for part, part_state in zip(parts, state, strict=True):
        if window is not None:
            part = _wait_for_window(part, [done.mean for done in reduced], window)
        done, part_state = run(as_generator(reducer, part, part_state, comm, extras), comm)
        reduced.append(done)
        states.append(part_state)
    return reduced, tuple(states)


def _wait_for_window(vector: Array, arrived: list[Array], window: int) -> Array:
    """The same vector, available only once the partition that leaves the window has arrived."""
    if not arrived:
        return vector
    last = arrived[-1]
    if window == 1:
        return order_after(vector, last)
    first = arrived[-window:][:1] if len(arrived) >= window else []

    def wait_for_last(vector, last, first):
        return order_after(vector, last)

    def wait_for_first(vector, last, first):
        return order_after(vector, first)

    # Collectives on CPU block, and would be merged within a window.
    return lax.platform_dependent(vector, last, first, cpu=wait_for_last, default=wait_for_first)
