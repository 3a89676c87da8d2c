"""The cost of each layer of a loss, in the order of the forward pass."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
from jax.extend import core

from .._core.jaxprs import inner_jaxprs
from .._core.types import PyTree
from ..analysis.measured import seconds_of
from ..schedule.buckets import FORMS, Entry, assign_buckets, leaf_entries
from ..schedule.profile import Profile, merge_layers, profile_of
from ..schedule.timeline import Timeline, step_timeline


class Layer(NamedTuple):
    """A top-level entry of the parameters."""

    name: Entry  # its key, as in `schedule.forward_order`
    bytes: int  # the size of its parameters, and so of its gradient
    flops: float  # operations of its forward pass: matrix products and convolutions


def layers_of(loss: Callable[..., Any], params: PyTree, batch: Any) -> list[Layer]:
    """Finds the layers in the order of the forward pass from a trace, without computing anything.

    A layer begins at the first use of one of its parameters; the computation from there to the beginning of the next
    layer is its work. Layers that the loss does not use come last: their gradients are sent too.

    Examples:
      >>> import jax.numpy as jnp
      >>> params = {"out": jnp.zeros((8, 2)), "in": jnp.zeros((4, 8))}
      >>> layers = layers_of(lambda params, x: (x @ params["in"] @ params["out"]).sum(), params, jnp.zeros((3, 4)))
      >>> [(layer.name, layer.bytes, layer.flops) for layer in layers]
      [('in', 128, 192.0), ('out', 64, 96.0)]
    """
    names = leaf_entries(params)
    sizes: dict[Entry, int] = {}
    for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
        sizes[name] = sizes.get(name, 0) + math.prod(leaf.shape) * leaf.dtype.itemsize
    # The leaves of the parameters are the first inputs of the traced loss, in their order.
    jaxpr = jax.make_jaxpr(loss)(params, batch).jaxpr
    owner = {var: name for var, name in zip(jaxpr.invars, names)}
    flops: dict[Entry, float] = {}
    current = None
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in FORMS and isinstance(eqn.invars[0], core.Var) and eqn.invars[0] in owner:
            # Casts and reshapes of a parameter are not yet a use of it.
            owner[eqn.outvars[0]] = owner[eqn.invars[0]]
            continue
        for var in eqn.invars:
            name = owner.get(var) if isinstance(var, core.Var) else None
            if name is not None and name not in flops:
                flops[name], current = 0.0, name
        if current is not None:
            flops[current] += _flops(eqn)
    return [Layer(name, sizes[name], flops.get(name, 0.0)) for name in dict.fromkeys((*flops, *sizes))]


def profile_from_rate(layers: list[Layer], *, flops: float | int) -> Profile:
    """Makes the profile of layers whose backward pass takes twice the forward pass."""
    forward = [layer.flops / flops for layer in layers]
    # Each matrix product has two in its backward pass: for the input and for the weights.
    backward = [2 * seconds for seconds in forward]
    return profile_of(forward=forward, backward=backward, sizes=[layer.bytes for layer in layers])


def group_layers(layers: Sequence[Layer], bucket_bytes: int) -> list[list[int]]:
    """Groups neighbors whose gradients are sent together, up to `bucket_bytes`, starting with the last layer.

    The last layer is ready first. Layers and groups are in forward order.
    """
    # Gradients become ready from the last layer to the first.
    backward = assign_buckets([layer.bytes for layer in reversed(layers)], bucket_bytes=bucket_bytes)
    return [[len(layers) - 1 - i for i in reversed(group)] for group in backward]


def step_of(layers: list[Layer], profile: Profile, *, groups: Sequence[Any], **options: Any) -> Timeline:
    """Simulates the step of `partitioned(exact(), layers=groups, ...)` on a link, layer by layer.

    A group is the name of a layer, or a tuple of names that are sent together; a message is attributed to the first
    layer of its group.
    """
    number = {layer.name: i for i, layer in enumerate(layers)}
    members = [[number[name] for name in (group if isinstance(group, tuple) else (group,))] for group in groups]
    run = step_timeline(merge_layers(profile, members), **options)
    done = [time for group, time in zip(members, run.done, strict=True) for _ in group]
    messages = [message._replace(layer=members[message.layer][0]) for message in run.messages]
    # The forward pass is not interrupted: each layer begins where the one before it ends.
    ends = list(accumulate(profile.forward, initial=run.forward[0][0]))
    return Timeline(tuple(done), tuple(messages), tuple(pairwise(ends)), run.makespan)


def measure_rate(loss: Callable[..., Any], params: PyTree, batch: Any, layers: list[Layer], *, steps: int = 3) -> float:
    """Measures the operations per second of forward and backward pass on one device: the fastest of a few."""
    gradient = jax.jit(jax.grad(loss))
    # The backward pass counts twice the forward pass.
    return 3 * sum(layer.flops for layer in layers) / min(seconds_of(partial(gradient, params, batch), steps))


def _flops(eqn: Any) -> float:
    """The operations of an equation and of the jaxprs inside it."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        # A multiplication and an addition for each product.
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        # Each output entry is the inner product of its window with one output channel of the kernel.
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    # A loop's body is traced once.
    repeated = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    return repeated * math.fsum(_flops(inside) for part in inner_jaxprs(eqn) for inside in part.jaxpr.eqns)
