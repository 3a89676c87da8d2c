"""Measures and counts what a step of the user's own costs with each reducer, apart from any link."""

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from ... import analysis
from ..._core.types import Like, PyTree
from ...analysis.base import Collectives
from ...analysis.step_time import StepCost, traffic
from ...reducers.exact import exact
from ...reducers.reducer import Reducer
from ...reducers.trees import is_map_params_placeholder
from ...runtime.mesh import make_mesh
from ..models.own_step import MakeStep, translate_failure


class OwnTrace(NamedTuple):
    """A step of the user's own with one reducer, as it was traced for a mesh that need not exist."""

    reducer: Reducer
    likes: tuple[PyTree[Like], ...]  # shapes of the trees that the reducer makes a state for, each of them once
    between: Collectives  # the collectives that the step asks for between workers
    axes: Mapping[str, int]  # of the mesh; workers are along the first

    def measure(self, *, compute: float, gloo: bool = False) -> StepCost:
        """The cost of the step: its traffic, and encoding and decoding as measured here."""
        workers, devices = next(iter(self.axes.values())), math.prod(self.axes.values())
        coding = sum(analysis.codec_seconds(self.reducer, like, workers=workers) for like in self.likes)
        return StepCost(compute, coding, traffic(self.between, workers=devices, gloo=gloo))


def trace_own_step(name: str, make: MakeStep, reducer: Reducer, axes: Mapping[str, int]) -> OwnTrace:
    """Traces the step that `make(mesh, reducer)` returns.

    What the compiler adds for automatic sharding is not among the collectives.

    Raises:
      ValueError: the step fails, or does not use the reducer.
    """
    likes: list[PyTree[Like]] = []
    mesh = _abstract_mesh(axes)
    with jax.sharding.use_abstract_mesh(mesh):
        found = make(mesh, _recorded(reducer, likes)).collectives(name)
    if not likes:
        raise ValueError(f"{name} does not use its reducer: give it to jaxdist.all_reduce")
    between = found.across(mesh, next(iter(axes)))
    return OwnTrace(reducer, tuple(likes), between, axes)


def measure_own_compute(name: str, make: MakeStep, axes: Mapping[str, int], *, repetitions: int = 3) -> float:
    """Measures the median time of one worker's step on the default device, without communication, on zeros.

    Raises:
      ValueError: a worker has several devices, or a batch of another size on a mesh of one device; the step fails.
    """
    instead = "give its time as --compute, in milliseconds"
    workers, *others = axes.values()
    if max(others, default=1) > 1:
        raise ValueError(f"a worker of {name} has several devices, of which one is here: {instead}")
    all_workers = _abstract_mesh(axes)
    with jax.sharding.use_abstract_mesh(all_workers):
        whole = make(all_workers, exact())
    mesh = make_mesh(dict.fromkeys(axes, 1), devices=jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        alone = make(mesh, exact())
        timed, wanted = ([_shape_on_device(x) for x in jax.tree.leaves(each.arguments[-1])] for each in (alone, whole))
        if timed != wanted:
            raise ValueError(
                f"the batch of {name} is {timed} on one device, and {wanted} for each of {workers} workers: let it "
                f"grow with mesh.size, or {instead}"
            )
        compiled = alone.lower(name).compile()
        with translate_failure(f"{name}, on one device"):
            # The first call warms up.
            return statistics.median([_time(compiled, alone.arguments) for _ in range(repetitions + 1)][1:])


def _abstract_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    # As those of `make_mesh`, and of a target.
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _recorded(reducer: Reducer, likes: list[PyTree[Like]]) -> Reducer:
    """The reducer, which notes the shapes of the trees that it makes a state for, each of them once."""

    def init(like: PyTree[Like]) -> Any:
        # Optax asks once without parameters, to find their places in a state.
        if not is_map_params_placeholder(like):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
            likes.extend([] if shapes in likes else [shapes])
        return reducer.init(like)

    forms = reducer.forms

    def shards(groups: int) -> Reducer:
        assert forms.shards is not None
        return _recorded(forms.shards(groups), likes)

    # Combinators take one of its forms in its place.
    contraction = forms.contraction and _recorded(forms.contraction, likes)
    return reducer._replace(init=init, forms=forms._replace(contraction=contraction, shards=forms.shards and shards))


def _shape_on_device(leaf: Like) -> tuple[int, ...]:
    sharding = getattr(leaf, "sharding", None)
    return tuple(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))


def _time(compiled: jax.stages.Compiled, shapes: tuple[Any, ...]) -> float:
    """Seconds of a step on new arguments, which it may donate."""
    arguments = jax.block_until_ready(jax.tree.map(_zeros, shapes))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def _zeros(leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        made = jnp.broadcast_to(jax.random.key(0), leaf.shape)
    else:
        made = jnp.zeros(leaf.shape, leaf.dtype)
    return made if leaf.sharding is None else jax.device_put(made, leaf.sharding)
