"""Exceptions of islands. All of them leave the state that the caller holds as it was."""

from .._core.checks import Portable


class IslandError(Portable, RuntimeError):
    """The base of the exceptions of `jaxdist.islands`."""


class StoreUnusableError(IslandError):
    """The store cannot create a name if, and only if, it is absent, or refuses to be read or written."""


class RunMismatchError(IslandError):
    """The run in the store has another model, reducer, outer optimizer or format; the message names the difference."""


class NameTakenError(IslandError):
    """A newer process has joined under the same name: this one must stop, and has written nothing since."""


class AnchorDiffersError(IslandError):
    """The global parameters of an island differ from those of the run again and again: other hardware, or a defect."""


class TooFewIslandsError(IslandError):
    """Fewer islands than `quorum` (or `begin_with`, at the start) were there for `patience` seconds."""


class DamagedError(IslandError):
    """Bytes in the store are not those that were written. Its message says which name and why."""
