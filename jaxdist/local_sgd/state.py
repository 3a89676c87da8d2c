"""What `local_steps` keeps, and the model in it that all workers agree on."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.types import Array, Flag, Float, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm
from ..reducers.exact import exact
from ..state.correspondence import NONE, beside
from ..state.marks import PerWorker
from ..transforms.quantized_state import is_coded
from .synchronize import either


class LocalStepsState(NamedTuple):
    """What has been agreed on, and what this worker keeps. A *round* ends when the workers of a fragment meet.

    Agreed: `count` of steps; of each fragment the steps `since` its last round, its `rounds`, the sum of the learning
    `rates` since then; the bytes `sent` by one worker, as (high, low) words; the `global_params`, the model that all
    workers started the round from, in float32 or better; the state of the `outer` optimizer for each fragment.
    Per worker: the state of the `inner` optimizer; `examples` since the last round of each fragment; with
    `overlap_correction`, the parameters that were `sent_from`. `reducer`: as the reducer defines it, for each fragment.
    """

    count: Int[Array, ""]
    since: Int[Array, " fragments"]
    rounds: Int[Array, " fragments"]
    rates: Float[Array, " fragments"]
    sent: UInt[Array, "2"]
    anchor: Updates
    outer: tuple[State, ...]
    inner: PerWorker
    examples: PerWorker
    reducer: tuple[State, ...]
    sent_from: PerWorker

    communicates = True


def global_params(opt_state: State) -> PyTree:
    """The model that the workers of `local_steps` agree on: the one to evaluate and to keep.

    Args:
      opt_state: an optimizer state with `local_steps` anywhere inside, placed or as a worker sees it.

    Returns:
      The anchor: a tree like the parameters, in float32 or better.

    Raises:
      ValueError: there is no `local_steps` inside.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=8)
      >>> jd.local_sgd.global_params(tx.init(jnp.ones(2))).tolist()
      [1.0, 1.0]

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, 2023.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LocalStepsState)):
        if isinstance(node, LocalStepsState):
            return node.anchor
    raise ValueError("this optimizer state has no local_steps inside, and so no anchor: evaluate the parameters")


Buffers = Literal["maintain", "reset", "average"]


def reset(inner: optax.GradientTransformation, state: State, params: PyTree) -> State:
    """Momentum and the like as `init` makes them, with the counts that belong to them; schedules go on counting."""
    fresh = inner.init(params)
    return jax.tree.map(lambda own, new, old: new if own else old, _buffers(inner, state, params), fresh, state)


def average(comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree) -> State:
    """If it is due: the mean over workers of momentum and the like; of the counts that belong to them the largest.

    *On the wire*: one all-reduce of all buffers, `2(W-1)/W · 4` bytes an entry; one for the counts.
    """
    if any(is_coded(x) for x in jax.tree.leaves(state, is_leaf=is_coded)):
        raise ValueError(
            'buffers="average" cannot average what quantized_state has coded: use buffers="maintain" or "reset"'
        )
    owned = _buffers(inner, state, params)

    def chosen(floating: bool) -> PyTree:
        return jax.tree.map(
            lambda own, x: x if own and jnp.issubdtype(x.dtype, jnp.floating) == floating else None, owned, state
        )

    def talk(comm, state):
        means, largest = exact().reduce(chosen(True), (), comm)[0].mean, comm.max(chosen(False))

        def one(old, mean, most):
            return comm.varying(old if mean is None and most is None else most if mean is None else mean)

        return jax.tree.map(one, state, means, largest, is_leaf=lambda x: x is None)

    return either(due, talk, lambda comm, state: comm.varying(state), comm, state)


def _buffers(inner: optax.GradientTransformation, state: State, params: PyTree) -> PyTree:
    """A tree of booleans: whether a leaf is a buffer shaped like the parameters, or a count that belongs to one.

    Adam's bias correction counts since its moments were zero, so that count goes with them. A learning-rate schedule
    counts steps and must go on. They are told apart by where they stand: in the same NamedTuple as a buffer, or not.
    """
    alike = jax.tree.map(lambda k: k != NONE, beside(inner.init, state, params, is_leaf=is_coded))
    structure = jax.tree.structure(params)

    def walk(node: Any, flags: Any) -> Any:
        if jax.tree_util.all_leaves([node]):
            return flags
        children, outside = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        below = outside.flatten_up_to(flags)
        if hasattr(node, "_fields") and any(_is_buffer(*pair, structure) for pair in zip(children, below, strict=True)):
            return jax.tree.map(lambda _: True, flags)
        return outside.unflatten([walk(*pair) for pair in zip(children, below, strict=True)])

    return walk(state, alike)


def _is_buffer(node: Any, flags: Any, structure: Any) -> bool:
    marked = jax.tree.leaves(flags)
    like_params = jax.tree.structure(node) == structure or not isinstance(node, tuple)
    return bool(marked) and all(marked) and like_params
