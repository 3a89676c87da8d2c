"""ZeRO-Offload: the optimizer's state in host memory, updated there or streamed through the device."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.compat import varying_axes
from .._core.trees import is_key, to_device
from .._core.types import PyTree, State, Updates
from ..state.marks import OnHost, is_mark
from ..transforms.extra_args import with_extra_args
from ..transforms.master import follow_parameter
from .delayed import delayed as with_delay
from .host_update.flatten import flatten
from .host_update.run import run

TILE_BYTES = 64 * 2**20
MISSING = "offload.host with master_dtype needs the parameters: call update(gradients, state, params)"


class MasterState(NamedTuple):
    """`inner`: the state of the optimizer; `master`: the parameters in higher precision."""

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
    """Keeps the state of any optimizer in host memory; the results are those of `inner`.

    Operations that read the state and compute the new one run beside it, all others on the device, and the cut is where
    the fewest bytes cross: for Adam gradients are sent to the host, and updates back. Around `zero_redundancy`,
    `host(zero_redundancy(inner))`, each worker's host has the state of its shard; the other order is refused.
    `docs/explanation/how-your-optimizer-runs.md` has the rest.

    *Between host and device*, in a step, for `M` parameters: with `compute="host"` `4M` bytes in bfloat16 with
    `master_dtype`, `8M` in float32; with `compute="device"` twice the state, `16M` bytes for Adam in float32.

    *On the wire*: the collectives of `inner`, unchanged.

    *State*: that of `inner`, every leaf in the mark `OnHost` around the mark it had, except typed keys, which remain on
    the device. A plain `jax.jit` that donates it must donate the parameters too.

    Args:
      inner: any optimizer. Loops that work on the state are refused.
      compute: where the update is computed: by the host's processor (ZeRO-Offload), or on the device, through which
        the state is streamed in portions. Use the device, unless the link to the host is slow and its memory fast.
      delayed: `True` or a step, the `start` of `offload.delayed`; an `inner` that communicates is delayed inside.
      master_dtype: `jnp.float32` keeps the parameters in it on the host, updates those, and sends their rounding.
        Inside `local_steps`, `noloco` and `gossip`, which change the parameters, these are sent to the host too.
      tile_bytes: the bytes of state in one portion, of which two are on the device at a time: smaller takes less
        memory there, larger has fewer transfers.

    Returns:
      A gradient transformation; call its `update` under `jax.jit`. With `master_dtype` updates are float32, so that
      added to the parameters they give the rounded master exactly.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxdist import offload
      >>> tx, params = offload.host(optax.adam(0.1)), jnp.zeros(4)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(jnp.ones(4), state, params)
      >>> state[0].mu.value.sharding.memory_kind, updates.sharding.memory_kind
      ('pinned_host', 'device')

    References:
      Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li, He, "ZeRO-Offload: Democratizing Billion-Scale Model
      Training", arXiv:2101.06840, 2021.
    """
    if compute not in ("host", "device"):
        raise ValueError(f'compute must be "host" or "device", got {compute!r}')
    check_range("tile_bytes", tile_bytes, 1, ends="[]")
    if master_dtype is not None:
        inner = with_master(inner, master_dtype)
    if delayed is not False:
        inner = with_delay(inner, 0 if delayed is True else delayed)
    tx = _Host(with_extra_args(inner), compute, delayed is not False, tile_bytes)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _Host(NamedTuple):
    inner: optax.GradientTransformationExtraArgs
    compute: Literal["host", "device"]
    is_delayed: bool
    tile_bytes: int

    def init(self, params: PyTree) -> State:
        def mark_on_host(node: Any) -> Any:
            # On a mesh JAX loses the memory kind of the typed keys that a step returns, and the next step fails.
            if isinstance(node, OnHost) or any(map(is_key, jax.tree.leaves(node))):
                return node
            return OnHost(jax.device_put(node, jax.memory.Space.Host))

        return jax.tree.map(mark_on_host, self.inner.init(params), is_leaf=is_mark)

    def update(self, updates: Updates, state: State, params: PyTree = None, **extra_args: Any) -> tuple[Updates, State]:
        replicated = [x for x in jax.tree.leaves(updates, is_leaf=is_mark) if not is_mark(x)]
        if self.is_delayed and any(map(varying_axes, replicated)):
            raise ValueError(
                "delayed= would keep gradients that differ between workers: average them before, or delay the shards "
                "of their mean, offload.host(zero_redundancy(offload.delayed(inner)))"
            )
        # Traced as if everything were on the device; `run` decides where each operation runs.
        bare = jax.tree.map(lambda x: x.value if isinstance(x, OnHost) else x, state, is_leaf=is_mark)

        def update_on_device(updates, bare, params):
            return self.inner.update(*jax.tree.map(to_device, (updates, bare, params)), **extra_args)

        arguments = (updates, bare, params)
        closed, shapes = jax.make_jaxpr(update_on_device, return_shape=True)(*arguments)
        if jax.tree.structure(shapes[1]) != jax.tree.structure(bare):
            raise ValueError("the optimizer returned a state with another tree than it was given")
        # The state follows the updates, among the flat arguments and among the flat results.
        first_in, first_out = len(jax.tree.leaves(updates)), len(jax.tree.leaves(shapes[0]))
        nodes = jax.tree.leaves(state, is_leaf=is_mark)
        on_host = [isinstance(node, OnHost) for node in nodes for _ in jax.tree.leaves(node)]
        pairs = {first_in + i: first_out + i for i, is_there in enumerate(on_host) if is_there}
        with jax.named_scope("offload_host"):
            given = jax.tree.leaves(arguments)
            out = run(flatten(closed), given, pairs, compute=self.compute, tile_bytes=self.tile_bytes)
        steps, new = jax.tree.structure(shapes).unflatten(out)
        return steps, jax.tree.map(
            lambda old, x: OnHost(x) if isinstance(old, OnHost) else x, state, new, is_leaf=is_mark
        )


def with_master(inner: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Updates a copy of the parameters in higher precision; the parameters are its rounding."""
    inner = with_extra_args(inner)

    def init(params) -> MasterState:
        master = jax.tree.map(lambda p: jnp.array(p, dtype), params)
        return MasterState(inner.init(master), master)

    def update(updates, state, params=None, *, moved: bool = False, **extra_args):
        if params is None:
            raise ValueError(MISSING)
        updates = jax.tree.map(lambda g: g.astype(dtype), updates)
        # A synchronizer around may have moved the parameters: the master follows, and keeps what they cannot hold.
        before = state.master
        if moved:
            before = jax.tree.map(follow_parameter, before, params)
        steps, new = inner.update(updates, state.inner, before, **extra_args)
        master = optax.apply_updates(before, steps)
        # In `dtype`, unlike other updates: added to the parameter it gives the rounding exactly.
        differences = jax.tree.map(lambda x, p: x.astype(p.dtype).astype(dtype) - p.astype(dtype), master, params)
        return differences, MasterState(new, master)

    return optax.GradientTransformationExtraArgs(init, update)
