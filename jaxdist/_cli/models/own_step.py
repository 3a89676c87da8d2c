"""A step of the user's own: a function that JAX can compile, and the shapes of its arguments."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from ...analysis.base import Collectives
from ...analysis.collectives import logical_collectives

RETURNS = (
    "write FUNCTION(mesh, ...) that returns (step, *arguments): step is jaxdist.distribute(train_step, mesh) or "
    "jax.jit(train_step), and the arguments are those of a call, as jaxdist.analysis.pods.abstract(make_state, batch, "
    "mesh) returns them, jax.ShapeDtypeStruct with shardings over the mesh"
)


class OwnStep(NamedTuple):
    """A step that can be lowered, and its arguments as shapes with shardings."""

    step: Any
    arguments: tuple[Any, ...]

    def lower(self, name: str) -> jax.stages.Lowered:
        """Traces the step; raises ValueError with its own error, in one line."""
        with translate_failure(name):
            return self.step.lower(*self.arguments)

    def collectives(self, name: str) -> Collectives:
        """The collectives of a trace, for the platform that is here; raises ValueError as `lower` does."""
        with translate_failure(name):
            return logical_collectives(self.step, *self.arguments, platform=jax.default_backend())


# make(mesh, reducer=None), of a mesh with or without devices; a reducer takes the place of the function's own.
MakeStep = Callable[..., OwnStep]


@contextlib.contextmanager
def translate_failure(name: str) -> Iterator[None]:
    """Raises ValueError, with the step's own error in one line, if what is inside fails."""
    try:
        yield
    except Exception as problem:
        raise ValueError(f"{name}: its step fails: {describe(problem)}; {RETURNS}") from problem


def takes_mesh(function: Callable[..., Any]) -> bool:
    """Returns whether a function has a first argument.

    Examples:
      >>> takes_mesh(lambda mesh, width=4: None), takes_mesh(lambda: None), takes_mesh(lambda *, mesh: None)
      (True, False, False)
    """
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    last = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return bool(kinds) and kinds[0] not in last


def own_step(name: str, made: Any, mesh: Mesh | AbstractMesh) -> OwnStep:
    """Checks what a user's function has returned, `(step, *arguments)`.

    Raises:
      ValueError: it is something else; the step has no `lower`; an argument is on other devices than those of the mesh.
    """
    if not isinstance(made, tuple) or len(made) < 2:
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ValueError(f"{name} returned a {type(made).__name__}{size}; {RETURNS}")
    step, *arguments = made
    if not callable(getattr(step, "lower", None)):
        kind = f"the function {step.__name__}" if inspect.isfunction(step) else f"a {type(step).__name__}"
        raise ValueError(f"{name} returned {kind} in place of a step, which cannot be compiled; {RETURNS}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(arguments)):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.Sharding) or isinstance(mesh, AbstractMesh):
            continue
        if not sharding.device_set <= set(mesh.devices.flat):
            raise ValueError(
                f"{name} returned an argument{jax.tree_util.keystr(path)} on {next(iter(sharding.device_set))}, and "
                f"not on the devices of the mesh; {RETURNS}"
            )
    return OwnStep(step, tuple(arguments))


def describe(problem: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(problem).__name__}: {next(iter(str(problem).splitlines()), '')}"
