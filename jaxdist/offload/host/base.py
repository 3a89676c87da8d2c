"""The optimizer's state in the memory of the host."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._core.compat import lies_on_host, varying_axes
from ..._core.types import Array, PyTree, State
from ...state.marks import OnHost, is_mark
from .delayed import delayed as with_delay
from .program import flatten
from .run import run

TILE_BYTES = 64 * 2**20
MISSING = "offload.host with master_dtype needs the parameters: call update(gradients, state, params)"


class MasterState(NamedTuple):
    """`inner` of the optimizer of `master`, the parameters in more precise numbers."""

    inner: State
    master: PyTree


def host(
    inner: optax.GradientTransformation,
    *,
    compute: Literal["host", "device"] = "host",
    delayed: bool | int = False,
    master_dtype: Any | None = None,
    tile_bytes: int = TILE_BYTES,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of any optimizer in the host's memory; the numbers are those of `inner`.

    The trace of `inner.update` is divided: what reads the state and makes the new one is done beside it, all else on
    the device, and the cut runs where the fewest bytes cross. So clipping, collectives and matrix products stay on the
    device, of the moments of Adam only gradients go down and only updates come up.

    - `compute="host"` (ZeRO-Offload): the host's processor updates. `4M` bytes cross a step for `M` parameters in
      bfloat16 with `master_dtype`, `8M` for float32.
    - `compute="device"`: the state visits the device in portions of `tile_bytes`; while one is computed on, the next
      travels. Twice the state crosses, 16M bytes for float32 Adam, but no processor stands in the way. Portions are
      rows, 8 or a multiple, as TPUs move them; matrices of fewer than 24 rows, and vectors of a length that is no
      multiple of 1024, visit it whole.

    Around `zero_redundancy` each worker keeps its part in its host's memory, `K/W` bytes a parameter, and computes on
    it: write `host(zero_redundancy(inner))`. The other order is refused.

    *On the wire*: what `inner` sends, unchanged.

    *State*: that of `inner`, every leaf in the mark `OnHost` around the mark it had. What `init` returns lies in host
    memory already; `distribute` and `simulate` keep it there, as do plain `jax.jit` and donation.

    Args:
      inner: any optimizer, or a chain. Loops that work on the state are refused.
      compute: where the update is computed. The device, unless the link to the host is slow and its memory fast.
      delayed: `True` or a step: from then on each update is that of the gradients of the step before, so that the host
        may work while the device does, where the compiler makes use of it; see `offload.delayed`. For an `inner` that
        communicates write `host(zero_redundancy(offload.delayed(...)))`.
      master_dtype: `jnp.float32` keeps the parameters in it on the host, updates those, and sends their rounding.
      tile_bytes: how much state is one portion: smaller takes less memory on the device, larger has fewer transfers.
        Two portions are at work at a time, with their results. A leaf larger than it is cut if its entries do not
        depend on one another.

    Returns:
      A gradient transformation; call its `update` under `jax.jit`. With `master_dtype` updates are float32, so that
      added to the parameters they give the rounded master exactly.

    Raises:
      ValueError: an argument is out of range; at trace time, a loop works on the state, or parameters are missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxdist import offload
      >>> tx, params = offload.host(optax.adam(0.1)), jnp.zeros(4)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(jnp.ones(4), state, params)
      >>> state[0].mu.value.sharding.memory_kind, updates.sharding.memory_kind
      ('pinned_host', 'device')

    References:
      Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li, He, "ZeRO-Offload: Democratizing Billion-Scale Model
      Training", arXiv 2101.06840, 2021.
    """
    if compute not in ("host", "device"):
        raise ValueError(f'compute must be "host" or "device", got {compute!r}')
    if tile_bytes < 1:
        raise ValueError(f"tile_bytes must be at least 1, got {tile_bytes}")
    waits = delayed is not False
    if master_dtype is not None:
        inner = _with_master(inner, master_dtype)
    if waits:
        inner = with_delay(inner, int(delayed) if delayed is not True else 0)
    inner = optax.with_extra_args_support(inner)

    def init(params) -> State:
        def one(node):
            return node if isinstance(node, OnHost) else OnHost(jax.tree.map(_to_host, node))

        return jax.tree.map(one, inner.init(params), is_leaf=is_mark)

    def update(updates, state, params=None, **extra_args):
        uncut = [x for x in jax.tree.leaves(updates, is_leaf=is_mark) if not is_mark(x)]
        if waits and any(map(varying_axes, uncut)):
            raise ValueError(
                "delayed= would keep gradients that differ between workers: average them before, or put the delay "
                "where they are, offload.host(zero_redundancy(offload.delayed(inner)))"
            )
        bare = jax.tree.map(lambda x: x.value if isinstance(x, OnHost) else x, state, is_leaf=is_mark)

        def whole(updates, bare, params):
            return inner.update(*jax.tree.map(_to_device, (updates, bare, params)), **extra_args)

        arguments = (updates, bare, params)
        closed, shapes = jax.make_jaxpr(whole, return_shape=True)(*arguments)
        if jax.tree.structure(shapes[1]) != jax.tree.structure(bare):
            raise ValueError("the optimizer returned a state with another tree than it was given")
        count = len(jax.tree.leaves(bare))
        first_in, first_out = len(jax.tree.leaves(updates)), len(jax.tree.leaves(shapes[0]))
        pairs = {first_in + i: first_out + i for i in range(count)}
        with jax.named_scope("offload_host"):
            out = run(flatten(closed), jax.tree.leaves(arguments), pairs, compute=compute, tile_bytes=tile_bytes)
        steps, new = jax.tree.structure(shapes).unflatten(out)
        return steps, jax.tree.map(
            lambda old, x: OnHost(x) if isinstance(old, OnHost) else x, state, new, is_leaf=is_mark
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _to_host(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Host)


def _to_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device) if lies_on_host(x) else x


def _with_master(inner: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Updates a copy of the parameters in more precise numbers; theirs are its rounding."""
    inner = optax.with_extra_args_support(inner)

    def init(params) -> MasterState:
        master = jax.tree.map(lambda p: jnp.array(p, dtype), params)
        return MasterState(inner.init(master), master)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(MISSING)
        updates = jax.tree.map(lambda g: g.astype(dtype), updates)
        steps, new = inner.update(updates, state.inner, state.master, **extra_args)
        master = optax.apply_updates(state.master, steps)
        # In more precise numbers, unlike other updates: added to the parameter it gives the rounding exactly.
        differences = jax.tree.map(lambda x, p: x.astype(p.dtype).astype(dtype) - p.astype(dtype), master, params)
        return differences, MasterState(new, master)

    return optax.GradientTransformationExtraArgs(init, update)
