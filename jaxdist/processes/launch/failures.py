"""Why a job failed, and how the launcher of one node says so to that of another."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._core.checks import Portable
from ..cluster import AgreementError, MismatchError, MissingProcessError, PortError
from .worker import describe_exit

KINDS = {kind.__name__: kind for kind in (MismatchError, MissingProcessError, PortError)}
Message = dict[str, Any]


class ProcessFailedError(Portable, RuntimeError):
    """A process of the job, of number `process`, failed, and the others were stopped.

    `code` is its return code, as in `subprocess`: negative for a signal. `log` is the file with its output, on the
    machine of its `node`, which is `None` in a job on one machine.
    """

    def __init__(self, process: int, code: int, log: Path, last: Sequence[str] = (), node: int | None = None):
        lines = "".join(f"\n  {line}" for line in last)
        where, there = ("", "") if node is None else (f" on node {node}", " there")
        super().__init__(f"process {process}{where} {describe_exit(code)}; {log}{there} ends with{lines or ' nothing'}")
        self.process, self.code, self.log, self.last, self.node = process, code, log, tuple(last), node


class NodeLostError(Portable, RuntimeError):
    """The launcher of a node, of number `node`, ended without a report, or its machine cannot be reached any more."""

    def __init__(self, node: int):
        super().__init__(f"node {node} was lost: its launcher or its machine ended, or the network between; look there")
        self.node = node


class Failure(NamedTuple):
    """A process that failed, the end of its output, and where the whole of it is."""

    process: int
    code: int
    log: str
    last: list[str]


def likely_cause(found: Sequence[tuple[Failure, int | None]]) -> ProcessFailedError:
    """Makes the error of the likely cause among processes, each with its node, that failed together."""
    # A killed process (code < 0) comes first: its peers exit with an error, or are aborted by JAX.
    order = {-signal.SIGABRT: 2}
    failure, node = min(found, key=lambda pair: (order.get(code := pair[0].code, int(code > 0)), pair[0].process))
    return ProcessFailedError(failure.process, failure.code, Path(failure.log), failure.last, node)


def encode_error(error: AgreementError) -> Message:
    """Makes a message of an error that all nodes raise."""
    return {"kind": "error", "type": type(error).__name__, "text": str(error), "processes": error.processes}


def decode_error(message: Message) -> AgreementError:
    """Returns the error of a message."""
    return KINDS[message["type"]](message["text"], tuple(message["processes"]))


def encode_failure(error: RuntimeError | None) -> Message | None:
    """Makes a message of why an attempt failed, or `None`."""
    if isinstance(error, ProcessFailedError):
        names = ("process", "code", "last", "node")
        return {"log": str(error.log), **{name: getattr(error, name) for name in names}}
    return {"lost": error.node} if isinstance(error, NodeLostError) else None


def decode_failure(message: Message | None) -> RuntimeError | None:
    """Returns why an attempt failed."""
    if message is None:
        return None
    if "lost" in message:
        return NodeLostError(message["lost"])
    log = Path(message["log"])
    return ProcessFailedError(message["process"], message["code"], log, message["last"], message["node"])
