"""`ef:qsgd:4`, `diloco:H=50/ef:qsgd:4`, `zero:2`: all that a command line may name as the way to train."""

from ..models.base import Method
from . import parse
from .sync import is_sync, parse_sync

ZERO = "zero"


def spell(sync: str | None, zero: int, reducer: str | None, default: str) -> str:
    """Joins `--sync`, or `--zero`, and `--reducer` to one spelling; without any of them it is the default.

    Example:
      >>> from jaxdist._cli.spellings.methods import spell
      >>> spell("diloco:H=50", 0, "ef:qsgd:4", "exact"), spell("diloco:H=50", 0, None, "exact")
      ('diloco:H=50/ef:qsgd:4', 'diloco:H=50')
      >>> spell(None, 2, "two_shot:qsgd:4", "exact"), spell(None, 0, "f16", "exact")
      ('zero:2/two_shot:qsgd:4', 'f16')
    """
    if sync is not None and zero:
        raise ValueError(f"--zero {zero} cuts what all workers agree on in every step, and with --sync they do not")
    first = f"{ZERO}:{zero}" if zero else sync
    if first is None:
        return default if reducer is None else reducer
    return first if reducer is None else f"{first}/{reducer}"


def parse_method(text: str, optimizer: str) -> Method:
    """Makes what `text` spells: a reducer, a stage of ZeRO, workers that meet every `H` steps, or an optimizer.

    Args:
      text: `SYNC[/REDUCER]`, with a name of `sync.SYNCS`, `zero:STAGE[/REDUCER]`, or what `parse.parse_method` takes.
      optimizer: the optimizer of each worker, as `parse.parse_optimizer` takes it. Methods that need its rate read it
        from here.

    Returns:
      A `Method`.

    Example:
      >>> from jaxdist._cli.spellings.methods import parse_method
      >>> parse_method("diloco:H=50/ef:qsgd:4", "adamw:1e-3").sync_period, parse_method("zero:3", "adamw:1e-3").stage
      (50, 3)
    """
    if is_sync(text):
        return parse_sync(text, optimizer)
    if text.partition(":")[0].strip() == ZERO:
        return _parse_zero(text, optimizer)
    return Method(*parse.parse_method(text, parse.parse_optimizer(optimizer)))


def _parse_zero(text: str, optimizer: str) -> Method:
    call, slash, carrier = parse.checked(text).partition("/")
    _, values, keywords = parse.parse_call(call)
    if keywords or values not in ([1], [2], [3]):
        raise ValueError(f"{text!r}: the stages of ZeRO are zero:1, zero:2 and zero:3")
    reducer = parse.parse_reducer(carrier if slash else "exact")
    return Method(reducer, parse.parse_optimizer(optimizer), stage=values[0])
