"""The delay by one step of `all_reduce(delay=1)`: a reduction of the last gradient, beside the pass for this one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import DTypeLike

from .._core.dtypes import working_dtype
from .._core.trees import tree_where
from .._core.types import Array, AxisNames, Bool, PyTree, State, Updates
from ..comm.over import over
from ..state.marks import PerWorker, bind, with_value
from .local_gradients import check_leaves, check_local, check_shapes, with_gradients
from .weights import divide_leaves, number_per_leaf, scale_leaves, weight_of_leaves


class LateState(NamedTuple):
    """The state of `all_reduce(delay=1)`.

    Attributes:
      inner: the state of `all_reduce(delay=0)`.
      gradient: the local gradient of the last step times its number of examples, in the dtypes of the parameters,
        float32 for float16 (per-worker): the mean of these products stays what it is on other workers.
      examples: for each leaf the number of examples behind it, 1 if the update was not passed any (per-worker).
      pending: whether there is one (replicated).
    """

    inner: State
    gradient: PerWorker
    examples: PerWorker
    pending: Bool[Array, ""]

    communicates = True

    def drop_pending(self, drop: Bool[Array, ""]) -> "LateState":
        """Drops the last gradient, on which every further step would fail as one did that `skip_nonfinite` skipped."""
        return self._replace(pending=self.pending & ~drop)


def late_reduction(
    reduction: optax.GradientTransformationExtraArgs, axis: AxisNames
) -> optax.GradientTransformationExtraArgs:
    """Reduces the last gradient, with the number of examples behind it, and keeps this one; see `all_reduce`.

    `offload.delayed` delays what follows a reduction. It keeps replicated gradients, without numbers of examples, and
    may begin at a later step.
    """

    def init_fn(params: PyTree) -> State:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _kept_dtype(x.dtype)), with_gradients(params))
        gradient, examples = bind((PerWorker(zeros), number_per_leaf(zeros)), axis)
        return LateState(reduction.init(params), gradient, examples, jnp.array(False))

    def update_fn(
        updates, state, params=None, *, examples: Any = None, active: Any = None, **extra_args
    ) -> tuple[Updates, State]:
        check_leaves(updates)
        check_shapes(updates, params)
        check_local(updates, axis)
        weight = weight_of_leaves(examples, active, updates)
        kept = state.examples.value
        late = optax.tree.cast_like(divide_leaves(state.gradient.value, kept), updates)
        # One number weighs the last gradient where one does this one.
        last = None if weight is None else jax.tree.structure(updates).unflatten(list(kept)) if weight.ndim else kept[0]
        mean, inner = reduction.update(late, state.inner, params, examples=last, **extra_args)
        # The zeros of the first step are no gradient: warm starts of low rank, for example, would become zero too.
        mean = tree_where(state.pending, mean, jax.tree.map(jnp.zeros_like, mean))
        inner = tree_where(state.pending, inner, state.inner)
        # A product, of which `resize` takes the mean over workers; NaN without examples is left out.
        gradient = optax.tree.cast_like(updates, state.gradient.value)
        gradient = gradient if weight is None else scale_leaves(gradient, weight)
        numbers = over(axis).varying(jnp.broadcast_to(jnp.float32(1) if weight is None else weight, kept.shape))
        return mean, LateState(
            inner, with_value(state.gradient, gradient), with_value(state.examples, numbers), jnp.array(True)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _kept_dtype(dtype: DTypeLike) -> DTypeLike:
    # A gradient of 200 from 512 examples is above the range of float16.
    return working_dtype(dtype) if dtype == jnp.float16 else dtype
