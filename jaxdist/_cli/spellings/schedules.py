"""Learning-rate schedules in the spelling of an optimizer: `adamw:4e-3,schedule=cosine,warmup_steps=100`."""

from typing import Any

import optax

from ...transforms.common import LearningRate
from .grammar import parse_call, refuse_name

NAMES = ("constant", "cosine", "linear")
ARGUMENTS = ("schedule", "warmup_steps", "decay_steps", "end_factor")
# For commands that compile or time a step without training: its length changes neither.
ANY_STEPS = 1 << 30


def take_schedule(keywords: dict[str, Any]) -> dict[str, Any]:
    """Removes the arguments of a schedule from those of an optimizer, and returns them.

    Examples:
      >>> keywords = {"b2": 0.99, "schedule": "cosine"}
      >>> take_schedule(keywords), keywords
      ({'schedule': 'cosine'}, {'b2': 0.99})
    """
    return {name: keywords.pop(name) for name in ARGUMENTS if name in keywords}


def make_rate(text: str, rate: float | int, given: dict[str, Any], steps: int | None) -> LearningRate:
    """Makes the learning rate of an optimizer: a number, or a schedule if its spelling has arguments of one.

    In the first `warmup_steps` the rate rises linearly to `rate`; by the end of `decay_steps`, which include them, it
    falls to `end_factor * rate`, along a cosine or a line, and stays there.

    Args:
      text: the spelling, for messages.
      given: the arguments of the schedule, from `take_schedule`.
      steps: the length of the run, the default of `decay_steps`; None if the command has no number of steps.

    Examples:
      >>> rate = make_rate("sgd:0.1,schedule=linear,warmup_steps=2", 0.1, {"schedule": "linear", "warmup_steps": 2}, 6)
      >>> [round(float(rate(step)), 3) for step in range(8)]
      [0.05, 0.1, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0]
    """
    if not given:
        return rate
    _check(text, given)
    name, warm = given.get("schedule", "constant"), given.get("warmup_steps", 0)
    # The first step has a rate above zero: 1/warm of the full rate.
    rise = optax.linear_schedule(rate / max(warm, 1), rate, max(warm - 1, 1))
    if name == "constant":
        return optax.join_schedules([rise, optax.constant_schedule(rate)], [warm])
    last, end = given.get("decay_steps", steps), given.get("end_factor", 0.0)
    if last is None:
        raise ValueError(f"optimizer {text!r}: this command has no number of steps; add decay_steps=N to the schedule")
    if warm >= last:
        raise ValueError(f"optimizer {text!r}: warmup_steps={warm} leaves none of the {last} steps for {name}")
    length = last - warm
    if name == "cosine":
        fall = optax.cosine_decay_schedule(rate, length, alpha=end)
    else:
        fall = optax.linear_schedule(rate, end * rate, length)
    return optax.join_schedules([rise, fall], [warm])


def _check(text: str, given: dict[str, Any]) -> None:
    """Checks the arguments of a schedule by themselves."""
    name, end = given.get("schedule", "constant"), given.get("end_factor", 0.0)
    if name not in NAMES:
        refuse_name("schedule", f"{name}", f"{name}", NAMES)
    for key in ("warmup_steps", "decay_steps"):
        if key in given and (type(given[key]) is not int or given[key] < 0):
            raise ValueError(f"optimizer {text!r}: {key} must be a whole number of steps, got {given[key]!r}")
    if type(end) not in (int, float) or not 0 <= end <= 1:
        raise ValueError(f"optimizer {text!r}: end_factor must be from 0 to 1, got {end!r}")
    extra = {"decay_steps", "end_factor"} & set(given)
    if name == "constant" and extra:
        raise ValueError(f"optimizer {text!r}: {min(extra)} goes with schedule=cosine or schedule=linear")


def peak_rate(text: str) -> float:
    """The learning rate in the spelling of an optimizer, the highest of its schedule.

    Examples:
      >>> peak_rate("adamw:4e-3,schedule=cosine")
      0.004
    """
    _, values, keywords = parse_call(text)
    return float(keywords["learning_rate"] if "learning_rate" in keywords else values[0])


def replace_rate(text: str, rate: float) -> str:
    """Spells the same optimizer with another learning rate.

    Examples:
      >>> replace_rate("adamw:4e-3,schedule=cosine", 0.008), replace_rate("sgd:momentum=0.9,learning_rate=0.1", 1.0)
      ('adamw:0.008,schedule=cosine', 'sgd:1,momentum=0.9')
    """
    name, _, rest = text.partition(":")
    # The rate comes first, or by name.
    first, *others = rest.split(",")
    kept = [part for part in (first, *others) if "=" in part and part.partition("=")[0].strip() != "learning_rate"]
    return ",".join([f"{name}:{rate:g}", *kept])
