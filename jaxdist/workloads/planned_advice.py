"""What to turn on when a plan does not fit, or waits too long for the network."""

from collections.abc import Mapping

from ..analysis import Overlap
from ..analysis.cost import Chip
from .base import Method
from .offloaded import Offload


def advise(
    device: Mapping[str, float],
    chip: Chip,
    method: Method,
    offload: Offload | None,
    found: Overlap | None,
    fits: bool,
) -> tuple[str, ...]:
    """What to turn on, the largest gain first."""
    lines = []
    cut = method.sync_period is None and method.reducer is not None
    state = device.get("parameters", 0) + device.get("optimizer state", 0)
    if not fits:
        if cut and method.stage == 0:
            lines.append("--zero 1 cuts the optimizer's state over the workers, --zero 3 the parameters too")
        elif cut and method.stage < 3:
            lines.append("--zero 3 cuts the parameters too")
        if offload is None and device.get("optimizer state", 0) > 0.05 * chip.memory:
            lines.append("--offload host keeps the optimizer's state in the host's memory")
        if device.get("temporaries", 0) > state:
            lines.append("temporaries are the larger part: fewer examples on each device (--batch), or more devices")
        if not lines:
            lines.append("more devices, or ones with more memory")
    elif found is not None and found.exposed_seconds > 0.2 * found.seconds:
        if method.reducer is not None and method.stage == 0:
            lines.append("communication is not hidden: a --reducer with fewer bytes, or --sync diloco:H=50")
        elif method.stage:
            lines.append(
                "communication is not hidden: more examples on each device (--batch), or --reducer two_shot:int8"
            )
        else:
            lines.append("communication is not hidden: more examples on each device (--batch), or a larger H")
    return tuple(lines)
