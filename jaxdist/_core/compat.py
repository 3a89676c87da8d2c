"""Every JAX name that moved, or that we may have to follow when it moves, between 0.10 and 0.12.

No other file of the library looks at a version.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import compute_on as _compute_on
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import ad, batching, mlir, partial_eval

from .types import Array, PyTree

Jaxpr = core.Jaxpr
Literal = core.Literal
# Whether XLA:CPU computes `(c r) u` as `r (c u)` for a constant c.
REORDERS_PRODUCTS = jax.__version_info__ < (0, 12)
# Type checkers do not see it in jax 0.12.
ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]


def keep_results(closed: Any, kept: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Returns the closed jaxpr of these results alone, and which of the arguments it still takes."""
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(kept))
    return ClosedJaxpr(jaxpr, closed.consts), list(used)


def evaluate_jaxpr(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr."""
    return core.jaxpr_as_fun(closed)(*arguments)


def mesh_axes_being_mapped() -> frozenset[str]:
    """The mesh axes that an enclosing `shard_map` handles by hand (none under `vmap` or plain `jit`)."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_axes_left_over() -> tuple[str, ...]:
    """The axes of the mesh around us with more than one device that the compiler still shards by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1)


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which the type of `x` says that its value differs."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def unreduced_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which the type of `x` says that it is a sum that was not taken: each worker has a term."""
    typed = jax.typeof(x)
    return frozenset(typed.manual_axis_type.unreduced) | frozenset(typed.sharding.spec.unreduced)


def types_are_checked(axes: tuple[str, ...]) -> bool:
    """Returns whether this is a `shard_map` over the axes that checks types: values have none otherwise."""
    # The index of a worker differs by definition: with `check_vma=False` even it has no type.
    mapped = bool(axes) and mesh_axes_being_mapped().issuperset(axes)
    return mapped and bool(varying_axes(jax.lax.axis_index(axes[0])))


def like_of(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape and dtype whose values differ over the same mesh axes as those of `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def vary_like(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """Types an array as differing at least over the mesh axes over which that of `eval_shape` does."""
    return cast_varying(x, like.manual_axis_type.varying if like.manual_axis_type else ())


def zeros_like_shape(like: jax.ShapeDtypeStruct, dtype: Any) -> Array:
    """Zeros with the shape of a result of `eval_shape`, and its sharding, a part of the type on Explicit axes."""
    # On other axes it has none.
    return jnp.zeros(like.shape, dtype, device=like.sharding)


def cast_varying(x: Array, names: Iterable[str]) -> Array:
    """Types an array as differing over mesh axes; the cast refuses those over which it does already."""
    missing = frozenset(names) - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def assume_replicated(x: Array, names: Iterable[str]) -> Array:
    """Types an array as equal over mesh axes, where a computation makes it equal in a way that types cannot tell.

    Nothing checks it. JAX has casts to "varying" only.
    """
    return _assume_replicated_p.bind(x, names=tuple(sorted(names)))


def _replicated_type(x: Any, *, names: tuple[str, ...]) -> Any:
    old = x.manual_axis_type
    return _retype(x, old.varying - set(names), old.unreduced)


def _retype(x: Any, varying: frozenset[str], unreduced: frozenset[str]) -> Any:
    old = x.manual_axis_type
    # Since 0.12 a sum or another reduction.
    kind = {"unreduced_kind": old.unreduced_kind} if unreduced and hasattr(old, "unreduced_kind") else {}
    return x.update(manual_axis_type=type(old)(varying=varying, unreduced=unreduced, reduced=old.reduced, **kind))


_assume_replicated_p = core.Primitive("assume_replicated")
_assume_replicated_p.def_impl(lambda x, *, names: x)
_assume_replicated_p.def_abstract_eval(_replicated_type)
mlir.register_lowering(_assume_replicated_p, lambda context, x, *, names: [x])
batching.defvectorized(_assume_replicated_p)
# As with a sum over workers, each of them receives the gradient of the one value.
ad.deflinear2(_assume_replicated_p, lambda cotangent, x, *, names: [cast_varying(cotangent, names)])


def cast_unreduced(x: Array, names: Iterable[str]) -> Array:
    """Types a sum that was not taken as each worker's own term, inside `shard_map`. JAX has casts to its sum only."""
    return _cast_unreduced_p.bind(x, names=tuple(sorted(names)))


def _type_of_term(x: Any, *, names: tuple[str, ...]) -> Any:
    old = x.manual_axis_type
    return _retype(x, old.varying | set(names), old.unreduced - set(names))


_cast_unreduced_p = core.Primitive("cast_unreduced")
_cast_unreduced_p.def_impl(lambda x, *, names: x)
_cast_unreduced_p.def_abstract_eval(_type_of_term)
mlir.register_lowering(_cast_unreduced_p, lambda context, x, *, names: [x])
batching.defvectorized(_cast_unreduced_p)


def with_weak_types(new: PyTree, old: PyTree) -> PyTree:
    """Gives a new state the weak types (those of Python's numbers) of the old one: the next call is not traced again.

    Weak types are kept, as they decide promotions: 0.1 times bfloat16 is bfloat16, but float32 with a strong 0.1.
    """

    def convert(x: Array, before: Array) -> Array:
        weak = jax.typeof(before).weak_type
        if jax.typeof(x).weak_type == weak:
            return x
        # `jax.lax` can only take a weak type away.
        return primitives.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)

    return jax.tree.map(convert, new, old)


def make_mesh(shape: Sequence[int], names: Sequence[str], *, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """A mesh with Auto axes; `jax.make_mesh` makes Explicit ones unless told, and renamed its first argument."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(tuple(shape), tuple(names), axis_types=auto, devices=devices)


def shard_map(
    f: Callable, *, mesh: Any, in_specs: Any, out_specs: Any, axis_names: set[str], check_vma: bool
) -> Callable:
    """`jax.shard_map`; `mesh=None` takes the mesh around us, as a nested call must."""
    keywords = {} if mesh is None else {"mesh": mesh}
    return functools.partial(
        jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=check_vma, **keywords)
    )


def host_compute(f: Callable, outputs: int) -> Callable:
    """`f` as a region that the host's processor computes; it returns that many arrays, in host memory."""
    # Until 0.10, and since 0.11.
    annotate: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
    return annotate(f, compute_type="device_host", out_memory_spaces=[jax.memory.Space.Host] * outputs)


def is_on_host(x: Any) -> bool:
    """Returns whether the type of `x`, an array or one of JAX's literals, says that it is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def has_backend() -> bool:
    """Returns whether JAX's backend has started; asking JAX for its devices would start it."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def triton_parameters(warps: int) -> Any | None:
    """The parameters of a Pallas kernel for Triton, whose programs have `warps` warps each.

    `None` where JAX does not run on GPUs, and, with a warning, where that backend, deprecated since 0.11, is gone. Also
    before JAX's backend has started, which a trace for shapes alone must not do: `jax.distributed.initialize` comes
    first.
    """
    if not has_backend() or jax.default_backend() != "gpu":
        return None
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        warnings.warn(
            f"jax {jax.__version__} has no Pallas backend for Triton: codes of blocks read a gradient twice, which "
            "takes about twice the time; the bits are the same",
            stacklevel=2,
        )
        return None
    return triton.CompilerParams(num_warps=warps)


def key_class() -> type:
    """The class of typed keys, which JAX does not export; found without making one, which would start the backend."""
    return next(kind for kind in jax.Array.__subclasses__() if kind.__name__ == "PRNGKeyArray")


def scan_sizes(parameters: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are the same in every round, and how many it carries from one to the next."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # Since 0.12.
    consts, carry, _ = parameters["ft_in"].unpack()
    return len(consts), len(carry)


def coordination_client() -> Any:
    """JAX's connection to process 0's coordination service: a dictionary of text that all processes share."""
    from jax._src import distributed

    return distributed.global_state.client


def listen_with_gloo_at(host: str) -> None:
    """Makes gloo, the transport between CPU processes, listen at this address of this machine.

    Otherwise it listens where the name of the machine leads, which many systems resolve to their loopback interface.
    JAX has no option for it. Call it after `jax.distributed.initialize`, and before the backend has started.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    def make_client() -> Any:
        if jax.config.values["jax_cpu_collectives_implementation"] != "gloo":
            return xla_bridge.make_cpu_client()
        client = distributed.global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def mixes_collectives() -> bool:
    """Whether XLA may run collectives of a loop or a branch beside others of the program, which gloo mixes up.

    CPU processes do so where they have several threads: one ends with "Received data size doesn't match expected size",
    or takes the data of one collective for those of another. Of others the order is that of the program.
    """
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def find_known_problems() -> list[tuple[str, str]]:
    """What is known to be bad in what runs here, and what to do about it."""
    found = []
    if jax.default_backend() == "cpu":
        found.append(
            (
                "lax.psum_scatter of 8 MiB or more gives wrong numbers between CPU processes (jax-ml/jax#40830)",
                "jaxdist goes another way; in collectives of your own use Comm.reduce_scatter_mean",
            )
        )
    if jax.default_backend() == "cpu" and jax.process_count() > 1:
        found.append(
            (
                "the first collective over an axis fails if a CPU process comes to it 30 s after another",
                "call jd.processes.check_consistency(state, mesh=mesh) while all are about as far; later ones wait as "
                "long as it takes",
            )
        )
        found.append(
            (
                "between CPU processes of several threads, collectives of a loop or branch may meet others of the "
                "program, and a process ends or computes wrong numbers",
                "jaxdist orders those of a distributed step; set NPROC=1 for programs of your own, if a process has "
                "one device",
            )
        )
        if getattr(jax.config, "jax_compilation_cache_dir", None):
            found.append(
                (
                    "of several CPU processes only process 0 finds its programs in the compile cache",
                    "leave it unset: the others compile while process 0 waits for them",
                )
            )
    return found
