"""`diloco:H=50` on a command line: workers that step by themselves and meet every `H` steps.

The grammar is that of `parse`: a name, then after a colon `key=value` pairs. A reducer after a slash carries the
difference, as in `diloco:H=50/ef:qsgd:4`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from ... import local_sgd, recipes
from ..models.base import Method
from . import parse


class _Entry(NamedTuple):
    """`factory` makes the transformation; `spelling` and `purpose` are for the help."""

    factory: Callable[..., optax.GradientTransformation]
    spelling: str
    purpose: str


SYNCS = {
    name: _Entry(factory, f"{name}:{spelling}", purpose)
    for name, factory, spelling, purpose in (
        ("local_sgd", local_sgd.local_sgd, "H=N[,buffers=reset]", "the mean of the workers' models every N steps"),
        (
            "post_local_sgd",
            local_sgd.post_local_sgd,
            "H=N,switch_step=S",
            "plain all-reduce for S steps, then local_sgd",
        ),
        (
            "slowmo",
            local_sgd.slowmo,
            "H=N[,momentum=B]",
            "local_sgd with a momentum of its own, one step of it a round",
        ),
        ("diloco", local_sgd.diloco, "H=N[,learning_rate=R,momentum=M]", "an outer Nesterov step every N steps"),
        (
            "streaming_diloco",
            local_sgd.streaming_diloco,
            "H=N,fragments=P[,delay=D]",
            "diloco by fragments that meet at steps of their own",
        ),
        (
            "sparse_loco",
            local_sgd.sparse_loco,
            "H=N",
            "the largest few of each block, in 2 bits with feedback, and no outer momentum",
        ),
        (
            "noloco",
            local_sgd.noloco,
            "H=N",
            "diloco in pairs drawn at random, instead of all workers together",
        ),
        (
            "palsgd",
            local_sgd.palsgd,
            "H=N[,probability=P,pull=E]",
            "diloco whose workers are pulled to where they started",
        ),
        (
            "muloco",
            local_sgd.muloco,
            "H=N,learning_rate=R",
            "diloco with Muon of rate R for matrices, and Adam at the rate of --optimizer",
        ),
        (
            "async_model_average",
            recipes.bagua.async_model_average,
            "H=N[,delay=D]",
            "local_sgd whose mean arrives D steps late, and workers keep what they did meanwhile",
        ),
    )
}


def describe() -> str:
    """The ways to talk every H steps, one a line, for `--help`."""
    return "\n".join(f"{entry.spelling}: {entry.purpose}" for entry in SYNCS.values())


def is_sync(text: str) -> bool:
    """Whether a spelling begins with the name of one of `SYNCS`.

    Example:
      >>> from jaxdist._cli.spellings.sync import is_sync
      >>> is_sync("diloco:H=50/qsgd:4"), is_sync("qsgd:4")
      (True, False)
    """
    return text.partition(":")[0].partition("/")[0].strip() in SYNCS


def parse_sync(text: str, optimizer: str) -> Method:
    """Makes what `text` spells, which must begin with a name of `SYNCS`; arguments as for `methods.parse_method`."""
    call, slash, carrier = parse.checked(text).partition("/")
    name, values, keywords = parse.parse_call(call)
    if name not in SYNCS:
        raise ValueError(f"unknown sync {text!r}; known: {', '.join(SYNCS)}, each with H=, as in diloco:H=50")
    factory = SYNCS[name].factory
    takes = inspect.signature(factory).parameters
    period = keywords.pop("H", None)
    if values or period is None:
        raise ValueError(f"sync {text!r}: say how many steps lie between two rounds by name, as in {name}:H=50")
    if type(period) is not int or period < 1:
        raise ValueError(f"sync {text!r}: H must be a positive whole number, got {period!r}")
    given: dict[str, Any] = {"sync_period": period}
    if slash:
        if "reducer" not in takes:
            raise ValueError(f"sync {text!r}: {name} says by itself what is sent, and takes no reducer")
        given["reducer"] = parse.parse_reducer(carrier)
    inner = parse.parse_optimizer(optimizer)
    rate = (
        "learning_rate" if "inner" in takes else "adam_learning_rate"
    )  # of the steps in between, where it is asked for
    if rate in takes and takes[rate].default is inspect.Parameter.empty:
        given[rate] = parse.learning_rate(optimizer)
    if "inner" in takes:
        factory = functools.partial(factory, inner)
    return Method(None, parse.call("sync", text, factory, [], given | keywords), period)
