"""Integer sums: entries are rounded in a scale that all workers share, and an all-reduce adds them."""

from functools import partial

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import next_count
from .._core.types import Array, Float, Updates
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm
from ..wire.buffers import stack_by_shape, unstack
from ..wire.codec import step_key
from .integers import check_integer_bits, levels_of_sum, sum_of_integers
from .messages import from_generator
from .reducer import DrawState, Extras, Messages, Protocol, Reduced, Reducer, init_draws


@with_description
def integer_sum(bits: int = 8, *, seed: int = 0) -> Reducer:
    """Integers in the scale of the largest entry of all: `α = L / max_w |x_w|∞`, `q = round(α x)`, as in `intsgd`.

    With `L = ⌊127/W⌋` (8 bits) nothing is ever clipped and no sum overflows; rounding is stochastic and unbiased, with
    an error below `max / L` per entry. The price is another round for the largest entries. Inside error feedback errors
    stay bounded for `L` of two and more, up to 63 workers.

    *On the wire*: an all-reduce of one float32 for each leaf, then one of `n` bytes as int8 (or `4 n` as int32);
    `2(W-1)/W` of both sent.

    *State* (replicated): a key and a count.

    Args:
      bits: 8 for up to 127 workers (31 levels at 4 workers, 15 at 8, 7 at 16); 32 costs as much as float32 and is
        nearly exact.

    Raises:
      ValueError: `bits` is neither 8 nor 32; at trace time, more than 127 workers with 8 bits.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.integer_sum()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([[63.0, 2.0], [-61.0, 4.0]]))[0].tolist()
      [1.0, 3.0]

    References:
      Mishchenko, Wang, Kovalev, Richtárik, "IntSGD: Adaptive Floatless Compression of Stochastic Gradients",
      arXiv:2102.08374, 2021 (its baseline with a shared maximum).
    """
    check_integer_bits(bits)
    return from_generator("integer_sum", partial(init_draws, seed), partial(_integer_messages, bits))


def _integer_messages(bits: int, updates: Updates, state: DrawState, comm: Comm, extras: Extras) -> Protocol:
    levels = levels_of_sum(bits, comm.size)
    leaves, tree = jax.tree.flatten(updates)
    groups, stacks = stack_by_shape(leaves)
    # α = L / max_w |x_w|∞: the largest entry of all workers becomes the largest code.
    received = yield Messages(max=[_largest(stack) for stack in stacks])
    # At most so large that 1 / (α W), by which XLA multiplies, is a normal number.
    limit = 0.5 / (jnp.finfo(jnp.float32).tiny * comm.size)
    alphas = [jnp.minimum(levels / jnp.where(top == 0, 1, top), limit) for top in received.max]
    key = step_key(state.key, state.count, comm, shared=False)
    means, owns = yield from sum_of_integers(stacks, alphas, key, comm, bits)
    reduced = Reduced(tree.unflatten(unstack(groups, means)), tree.unflatten(unstack(groups, owns)))
    return reduced, DrawState(state.key, next_count(state.count))


def _largest(stack: Array) -> Float[Array, " k"]:
    """The largest magnitude of each of `k` leaves."""
    return largest_entry(jnp.abs(stack).astype(jnp.float32), range(1, stack.ndim), initial=0)
