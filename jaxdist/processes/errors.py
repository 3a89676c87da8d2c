"""What processes can fail to agree on, as exceptions that name the process."""

from .._core.errors import Portable


class AgreementError(Portable, ValueError):
    """The processes of a job cannot work together. All of them raise the same, before the first collective.

    Attributes:
      processes: the numbers of the processes that are the cause.
    """

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        super().__init__(message)
        self.processes = processes


class MismatchError(AgreementError):
    """A process has another version, setting, number of processes, mesh, recipe or leaf than process 0, or its id."""


class MissingProcessError(AgreementError):
    """A process did not come in time, or ended while it waited for the others."""


class PortError(AgreementError):
    """The coordinator's address is unknown or another machine's, or another program has the port or answers there."""
