"""Exceptions of processes that cannot work together, which name the process."""

from .._core.errors import Portable


class AgreementError(Portable, ValueError):
    """The processes of a job cannot work together. All of them raise the same error, before the first collective.

    Attributes:
      processes: the numbers of the processes that are the cause.
    """

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        super().__init__(message)
        self.processes = processes


class MismatchError(AgreementError):
    """The version, setting, number of processes, mesh, recipe or leaf of a process differs, or two have one id."""


class MissingProcessError(AgreementError):
    """A process did not check in in time, or ended while it waited for the others."""


class PortError(AgreementError):
    """The coordinator's address is unknown or not process 0's, or another program uses the port."""
