"""Rules on a virtual clock, for the command line: how they are spelled, what they train on, and the log."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...asynchronous import durations, links, replay, rules
from ...asynchronous.protocol import Rule
from ...topology.base import Topology
from ...topology.varying import relabelled_ring
from ..advice import parse_link
from ..models.base import Workload
from ..models.digits import Digits, splits
from ..models.partition import dirichlet_partition
from ..plotting.topologies import MAKE as GRAPHS
from . import parse


def _graph(name: str) -> Callable[[int], Topology]:
    if name not in GRAPHS:
        raise ValueError(f"unknown graph {name!r}; known: {', '.join(GRAPHS)}")
    return GRAPHS[name]


def _hop(
    graph: str = "ring",
    *,
    tokens: int | None = None,
    backup: int = 0,
    staleness: int = 0,
    skip: int = 0,
    optimizer: optax.GradientTransformation,
) -> Rule:
    return rules.hop(_graph(graph), optimizer, tokens=tokens, backup=backup, staleness=staleness, skip=skip)


def _prague(
    group_size: int, groups: str = "smart", *, max_lag: float = 4, optimizer: optax.GradientTransformation
) -> Rule:
    made: Any = groups
    return rules.prague(optimizer, group_size=group_size, groups=made, max_lag=max_lag)


def _even_ring(workers: int) -> Topology:
    # Cycles must be even; of an odd number of workers the first and the last are no neighbors.
    return GRAPHS["path" if workers % 2 else "ring"](workers)


def _ad_psgd(
    graph: str | None = None,
    *,
    optimizer: optax.GradientTransformation,
    rank: int | None = None,
    group: int = 1,
    choice: str = "uniform",
) -> Rule:
    # The randomized ring of halves, since others have odd cycles.
    made = functools.partial(relabelled_ring, halves=True) if graph == "relabelled-ring" else _even_ring
    if graph not in (None, "relabelled-ring"):
        made = _graph(graph)
    settings: dict[str, Any] = {"choice": choice, "exchange": None if rank is None else rules.power_gossip(rank)}
    if group == 1:
        return rules.ad_psgd(made, optimizer, **settings)
    return rules.hierarchical_ad_psgd(made, optimizer, group_size=group, **settings)


def _d_psgd(graph: str = "ring", *, optimizer: optax.GradientTransformation, order: str = "adapt_then_combine") -> Rule:
    settings: dict[str, Any] = {"order": order}
    return rules.d_psgd(_graph(graph), optimizer, **settings)


AVERAGING = ("hop", "prague", "ad_psgd", "d_psgd", "delay_by_one")  # these send models, and no gradients


# name: (factory of a rule, how it is spelled, what it does)
RULES: dict[str, tuple[Callable[..., Rule], str, str]] = {
    "bsp": (rules.bsp, "bsp", "synchronous: an all-reduce that waits for the slowest"),
    "backup_workers": (
        rules.backup_workers,
        "backup_workers:SPARE",
        "synchronous, without the SPARE slowest of each step",
    ),
    "asgd": (rules.asgd, "asgd", "every gradient is a step, however old"),
    "staleness_aware": (
        functools.partial(rules.asgd, rate=rules.staleness_aware()),
        "staleness_aware",
        "asgd with a rate that falls with the age of a gradient",
    ),
    "dc_asgd": (rules.dc_asgd, "dc_asgd[:compensation=L,decay=M]", "asgd that corrects old gradients"),
    "ssp": (rules.ssp, "ssp:STALENESS", "nobody is more iterations ahead"),
    "rennala": (rules.rennala, "rennala:BATCH[,stop=True]", "gathers so many gradients at one model"),
    "malenia": (rules.malenia, "malenia:BATCH[,stop=True]", "rennala for data that differ between workers"),
    "ringmaster": (rules.ringmaster, "ringmaster:DELAY[,stop=True]", "throws away what is older"),
    "ringleader": (rules.ringleader, "ringleader", "asynchronous, and every worker counts the same"),
    "dude": (rules.dude, "dude", "the last gradient of every worker in every step"),
    "ad_psgd": (
        _ad_psgd,
        "ad_psgd[:GRAPH,rank=R,group=N,choice=in_turn]",
        "averages with one neighbor at a time, and waits for nobody",
    ),
    "d_psgd": (
        _d_psgd,
        "d_psgd[:GRAPH,order=combine_then_adapt]",
        "averages with the neighbors, and waits for them alone",
    ),
    "delay_by_one": (rules.delay_by_one, "delay_by_one", "synchronous, the mean of models beside the gradient"),
    "hop": (
        _hop,
        "hop[:GRAPH,tokens=N,backup=N,staleness=N,skip=N]",
        "models go to neighbors in a graph, and queues keep them near each other",
    ),
    "prague": (_prague, "prague:SIZE[,random|static|smart,max_lag=N]", "models are averaged in groups that change"),
    "pipe_sgd": (rules.pipe_sgd, "pipe_sgd[:width=W]", "synchronous, with all-reduces behind the next computations"),
    "local_sgd": (rules.local_sgd, "local_sgd:sync_period=H", "local steps, averaged every H"),
    "dasgd": (rules.dasgd, "dasgd:sync_period=H,delay=D", "local_sgd whose averages travel during D local steps"),
    "lasgd": (rules.lasgd, "lasgd[:sync_period=H]", "local steps, averaged in the background, and nobody waits"),
    "palsgd": (rules.palsgd, "palsgd:learning_rate=R,sync_period=H", "local_sgd with pulls to the last average"),
    "any_batch": (rules.any_batch, "any_batch:SECONDS", "rounds of fixed time, as many gradients as there are"),
    "task_allocation": (rules.task_allocation, "task_allocation:BATCH", "synchronous, with shares by measured speed"),
}
LAWS: dict[str, tuple[Callable[..., durations.Durations], str]] = {
    "constant": (durations.constant, "constant:SECONDS"),
    "exponential": (durations.exponential, "exponential:MEAN"),
    "shifted_exponential": (durations.shifted_exponential, "shifted_exponential:SHIFT,MEAN"),
    "lognormal": (durations.lognormal, "lognormal:MEDIAN,SPREAD"),
}


def describe() -> str:
    """The rules, one a line, for `--help`."""
    return "\n".join(f"{spelling}: {purpose}" for _, spelling, purpose in RULES.values())


def parse_rule(text: str, optimizer: optax.GradientTransformation, gradient: str | None = None) -> Rule:
    """Makes the rule that `text` spells; `gradient` is a code for its gradients, `ef:` before it for feedback.

    Example:
      >>> import optax
      >>> from jaxdist._cli.spellings.replayed import parse_rule
      >>> parse_rule("ringmaster:3", optax.sgd(0.1)).name
      'ringmaster'
    """
    name, values, keywords = parse.parse_call(text)
    if name not in RULES:
        raise ValueError(f"unknown rule {text!r}; known: {', '.join(spelling for _, spelling, _ in RULES.values())}")
    rule = parse.call("rule", text, functools.partial(RULES[name][0], optimizer=optimizer), values, keywords)
    if gradient is None:
        return rule
    if name in AVERAGING:
        raise ValueError(f"rule {text!r} sends models, and no gradients that a code could shrink: leave out --gradient")
    kind = "gradient" if rule.server is not None else "reduced"
    feedback = gradient.startswith("ef:")
    code = parse.parse_code(gradient.removeprefix("ef:"))
    return rules.compressed(rule, {kind: code}, feedback=(kind,) if feedback else ())


def parse_factor(option: str, text: str) -> list[float]:
    """`4x` or `6x,0.1`: the factor, and what follows it."""
    first, *rest = parse.checked(text).split(",")
    try:
        return [float(first.strip().removesuffix("x")), *map(float, rest)]
    except ValueError:
        raise ValueError(f"{option} must be a factor such as 4x, got {text!r}") from None


def parse_durations(
    law: str,
    *,
    slow: str | None = None,
    random_slow: str | None = None,
    failures: str | None = None,
    recorded: Path | None = None,
) -> durations.Durations:
    """How long gradients take, from the options of the command.

    Example:
      >>> from jaxdist._cli.spellings.replayed import parse_durations
      >>> parse_durations("constant:1", slow="4x").name
      'one_slow(constant)'
    """
    name, values, keywords = parse.parse_call(law)
    if name not in LAWS:
        raise ValueError(f"unknown law {law!r}; known: {', '.join(spelling for _, spelling in LAWS.values())}")
    if recorded is None:
        made = parse.call("law", law, LAWS[name][0], values, keywords)
    else:
        made = durations.from_file(recorded)
    if slow is not None:
        made = durations.one_slow(made, worker=0, factor=parse_factor("--slow", slow)[0])
    if random_slow is not None:
        numbers = parse_factor("--random-slow", random_slow)
        if len(numbers) != 2:
            raise ValueError(f"--random-slow must be a factor and a probability, as in 6x,0.1, got {random_slow!r}")
        made = durations.random_slow(made, factor=numbers[0], probability=numbers[1])
    if failures is not None:
        numbers = parse_factor("--failures", failures)
        if len(numbers) != 2:
            raise ValueError(f"--failures must be the mean seconds up and down, as in 100,5, got {failures!r}")
        made = durations.failures(made, up=numbers[0], down=numbers[1])
    return made


def parse_links(text: str | None) -> links.Links:
    """`100mbit,20ms`, or instant messages."""
    if text is None:
        return links.instant()
    link = parse_link(text)
    return links.alpha_beta(float(link.latency), float(link.bandwidth))


def task(workload: Workload, *, batch: int, seed: int, workers: int, skew: float | None = None) -> replay.Task:
    """A workload as each worker sees it: batches of its own, drawn from (seed, worker, job).

    Args:
      workload: the model and the data.
      batch: examples in a gradient.
      seed: of the parameters.
      workers: how many, where their data differ.
      skew: concentration of the labels of each worker, for digits; None: all draw from all data.

    Returns:
      The task, evaluated on the held-out data.
    """
    parts = None
    if skew is not None:
        if workload.name != "digits":
            raise ValueError(f"--skew is for the workload 'digits', got {workload.name!r}")
        train, _ = splits()
        parts = dirichlet_partition(train.labels, workers, concentration=skew)

    def own(seed: int, worker: int, job: int) -> Any:
        if parts is None:
            return workload.batch(seed, (job << 24) | worker, batch)
        chosen = np.random.default_rng((seed, worker, job)).choice(parts[worker], batch)
        return Digits(train.images[chosen], train.labels[chosen])

    held = workload.held_out(256)
    metrics = jax.jit(workload.metrics)

    def evaluate(params: Any) -> Any:
        return jnp.mean(jnp.stack([metrics(params, one)["loss"] for one in held]))

    return replay.Task(workload.init(jax.random.key(seed)), workload.loss, own, evaluate)


def staleness(name: str, trace: replay.Trace) -> np.ndarray:
    """Of each gradient that was used: in versions of the model, or in gradients for `ad_psgd`, which has none."""
    return replay.peer_delays(trace) if parse.parse_call(name)[0] == "ad_psgd" else replay.delays(trace)


def write_events(name: str, run: replay.Result, log: TextIO) -> None:
    """Each event as a line of JSON, with the rule's name first."""
    for line in replay.event_lines(run.trace):
        log.write(json.dumps({"rule": name})[:-1] + ", " + line[1:] + "\n")
