"""All names that a command line knows, with their factories; the arguments are read from the signatures.

Learning-rate schedules have no names of their own: `adamw:4e-3,schedule=cosine,warmup_steps=100`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import optax

from ... import compressors, local_sgd, optimizers, recipes, reducers, topology
from ...asynchronous import durations, rules
from ...asynchronous.protocol import Rule
from ...topology.base import Topology
from ...topology.varying import relabeled_ring
from ...transforms.common import LearningRate
from .grammar import Spelling, parse_call, refuse_name

FEEDBACK = {
    "ef": Spelling(reducers.error_feedback, "keeps what was not sent and adds it to the next gradient"),
    "ef21": Spelling(reducers.ef21, "workers send the compressed change since their last estimate"),
    "loco": Spelling(reducers.loco, "adds a moving average of what was not sent, kept in 8 bits"),
}
COLLECTIVES = {
    "ring": Spelling(reducers.ring, "encoded partial sums around a ring, an error at each hop; compare with two_shot"),
    "two_shot": Spelling(reducers.two_shot, "encoded reduce-scatter and all-gather: the bytes of an all-reduce"),
}
# Reducers, and compressors of one array.
REDUCERS = {
    "exact": Spelling(reducers.exact, "plain all-reduce in float32"),
    "f16": Spelling(partial(compressors.cast, jnp.float16), "float16 on the wire"),
    "bf16": Spelling(partial(compressors.cast, jnp.bfloat16), "bfloat16 on the wire"),
    "fp8": Spelling(compressors.fp8, "8-bit floats, a scale for each block; use with ef:"),
    "mxfp8": Spelling(compressors.mxfp8, "8-bit floats in MX blocks; use with ef:"),
    "mxfp4": Spelling(compressors.mxfp4, "4-bit floats in MX blocks; use with ef:"),
    "e3m0": Spelling(compressors.e3m0, "4-bit powers of two; use with ef:"),
    "int8": Spelling(compressors.int8, "8-bit integers, a scale for each block"),
    "int4": Spelling(compressors.int4, "4-bit integers, a scale for each block; use with ef:"),
    "min_max_uint8": Spelling(compressors.min_max_uint8, "8-bit integers between the extremes of each array"),
    "natural": Spelling(compressors.natural, "unbiased rounding to powers of two, 9 bits"),
    "qsgd": Spelling(compressors.qsgd, "unbiased rounding to 2, 3, 4 or 8 bits"),
    "nuqsgd": Spelling(compressors.nuqsgd, "unbiased rounding to powers of 1/2"),
    "random_k": Spelling(compressors.random_k, "the same random entries on all workers; use with ef:"),
    "block_top_k": Spelling(compressors.block_top_k, "the largest entries of each block; use with ef:"),
    "dgc": Spelling(reducers.dgc, "the largest entries of an accumulated momentum; use with plain sgd"),
    "gspar": Spelling(compressors.gspar, "random entries, large ones always; unbiased"),
    "sign": Spelling(compressors.scaled_sign, "one bit per entry; use with ef:"),
    "drive": Spelling(compressors.drive, "one bit per entry after a random rotation; use with ef:"),
    "terngrad": Spelling(compressors.terngrad, "0 or plus or minus the largest entry; unbiased"),
    "top_k": Spelling(compressors.top_k, "the largest entries of each array; use with ef:"),
    "alq": Spelling(reducers.alq, "levels adapted to the gradients"),
    "amq": Spelling(reducers.amq, "levels that are powers of a fitted number"),
    "majority": Spelling(reducers.majority_vote, "workers vote on each sign; use a small learning rate"),
    "row_sparse": Spelling(
        reducers.row_sparse, "the mean, of which only rows that are not zero are sent; for embeddings"
    ),
    "median": Spelling(reducers.median, "the middle value of each entry; a few bad workers cannot move it far"),
    "trimmed_mean": Spelling(reducers.trimmed_mean, "the mean without the TRIM largest and smallest values"),
    "intsgd": Spelling(reducers.intsgd, "sums of integers of 8 or 32 bits with an adaptive scale"),
    "integer_sum": Spelling(reducers.integer_sum, "sums of integers, scaled by the largest entry"),
    "power_sgd": Spelling(reducers.power_sgd, "low-rank factors of each matrix; use with ef:"),
}
# Optimizers that communicate: they replace both the reducer and --optimizer.
OPTIMIZERS = {
    "compressed_adam": Spelling(
        recipes.compressed_adam,
        "Adam on each worker, then the reducer after a slash: compressed_adam:2e-3/ef:top_k:0.01",
    ),
    "demo": Spelling(optimizers.demo, "the strongest frequencies of each worker's momentum; replaces --optimizer"),
    "dion": Spelling(optimizers.dion, "orthonormal low-rank updates of matrices; replaces --optimizer"),
    "one_bit_adam": Spelling(optimizers.one_bit_adam, "Adam, then the signs of its momentum; replaces --optimizer"),
    "qadam": Spelling(optimizers.qadam, "Adam, then its momentum in 8 bits; replaces --optimizer"),
}
# Methods whose workers step locally and synchronize every H steps.
SYNCS = {
    "local_sgd": Spelling(local_sgd.local_sgd, "averages the workers' models every H steps"),
    "post_local_sgd": Spelling(local_sgd.post_local_sgd, "plain all-reduce for switch_step steps, then local_sgd"),
    "slowmo": Spelling(local_sgd.slowmo, "local_sgd with a slow momentum, one step of it per round"),
    "diloco": Spelling(local_sgd.diloco, "an outer Nesterov step every H steps"),
    "streaming_diloco": Spelling(
        local_sgd.streaming_diloco, "diloco in fragments that are synchronized at different steps"
    ),
    "sparse_loco": Spelling(
        local_sgd.sparse_loco, "the largest entries of each block, in 2 bits with feedback; no outer momentum"
    ),
    "noloco": Spelling(local_sgd.noloco, "diloco in random pairs instead of all workers together"),
    "palsgd": Spelling(local_sgd.palsgd, "diloco whose workers are pulled toward the last global parameters"),
    "muloco": Spelling(
        local_sgd.muloco, "diloco with Muon at learning_rate for matrices and Adam at the rate of --optimizer"
    ),
    "async_model_average": Spelling(
        recipes.bagua.async_model_average, "local_sgd whose mean arrives late; workers keep the steps made meanwhile"
    ),
}
# The reducers of methods that have one of their own, from their arguments.
ENCODINGS = {
    "one_bit_adam": "ef:two_shot:sign",
    "qadam": "two_shot:qsgd:8",
    "sparse_loco": "ef:block_top_k:{density},block={block}+jaxdist.compressors:two_means:block={values_block}",
}
WARM_UPS = ("warmup_steps", "switch_step")  # their arguments for the number of synchronous steps before the rounds
GRAPHS: dict[str, Callable[[int], Topology]] = {
    "ring": topology.ring,
    "directed-ring": partial(topology.ring, directed=True),
    "torus": topology.torus,
    "hypercube": topology.hypercube,
    "complete": topology.complete,
    "exponential": topology.exponential,
    "one-peer-exponential": topology.one_peer_exponential,
    "random-matchings": topology.random_matchings,
    "relabeled-ring": topology.relabeled_ring,
    # MATCHA activates random matchings of a base graph: each base has its own name.
    "matcha-ring": lambda workers: topology.matcha(topology.ring(workers)),
    "matcha-complete": lambda workers: topology.matcha(topology.complete(workers)),
    "shift-one": topology.shift_one,
    "star": topology.star,
    "path": topology.path,
    "binary-tree": topology.binary_tree,
}
SCHEDULES = ("constant", "cosine", "linear")
SCHEDULE_ARGUMENTS = ("schedule", "warmup_steps", "decay_steps", "end_factor")
# For commands that compile or time a step without training: its length changes neither.
ANY_STEPS = 1 << 30


def find_graph(name: str) -> Callable[[int], Topology]:
    """Returns the factory of a topology; raises ValueError if the name is unknown."""
    if name not in GRAPHS:
        refuse_name("graph", name, name, GRAPHS)
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
    return rules.hop(find_graph(graph), optimizer, tokens=tokens, backup=backup, staleness=staleness, skip=skip)


def _prague(
    group_size: int,
    groups: Literal["smart", "random", "static"] = "smart",
    *,
    max_lag: float = 4,
    node_size: int | None = None,
    optimizer: optax.GradientTransformation,
) -> Rule:
    return rules.prague(optimizer, group_size=group_size, groups=groups, max_lag=max_lag, node_size=node_size)


def _even_ring(workers: int) -> Topology:
    # AD-PSGD needs a bipartite graph, and a ring is one only if it is even: drop a link from an odd ring.
    return GRAPHS["path" if workers % 2 else "ring"](workers)


def _ad_psgd(
    graph: str | None = None,
    *,
    optimizer: optax.GradientTransformation,
    rank: int | None = None,
    group: int = 1,
    choice: Literal["uniform", "in_turn"] = "uniform",
) -> Rule:
    if graph is None:
        make_graph = _even_ring
    elif graph == "relabeled-ring":
        # Only the variant of two halves has no odd cycles.
        make_graph = partial(relabeled_ring, halves=True)
    else:
        make_graph = find_graph(graph)
    settings: dict[str, Any] = {"choice": choice, "exchange": None if rank is None else rules.power_gossip(rank)}
    if group == 1:
        return rules.ad_psgd(make_graph, optimizer, **settings)
    return rules.hierarchical_ad_psgd(make_graph, optimizer, group_size=group, **settings)


def _d_psgd(
    graph: str = "ring",
    *,
    optimizer: optax.GradientTransformation,
    order: Literal["adapt_then_combine", "combine_then_adapt"] = "adapt_then_combine",
) -> Rule:
    return rules.d_psgd(find_graph(graph), optimizer, order=order)


def _any_batch_gossip(
    window: float,
    graph: str = "ring",
    *,
    optimizer: optax.GradientTransformation,
    weights: Literal["batch", "uniform"] = "batch",
) -> Rule:
    return rules.any_batch_gossip(window, find_graph(graph), optimizer, weights=weights)


# Rules of asynchronous training. Those that average models send no gradients that could be compressed.
AVERAGING = ("hop", "prague", "ad_psgd", "d_psgd", "delay_by_one", "any_batch_gossip")
RULES = {
    "bsp": Spelling(rules.bsp, "synchronous: an all-reduce that waits for the slowest worker"),
    "backup_workers": Spelling(rules.backup_workers, "synchronous, without the SPARE slowest gradients of each step"),
    "asgd": Spelling(rules.asgd, "applies every gradient, however old"),
    "staleness_aware": Spelling(
        partial(rules.asgd, rate=rules.staleness_aware()), "asgd with a rate that falls with the age of a gradient"
    ),
    "dc_asgd": Spelling(rules.dc_asgd, "asgd that corrects old gradients"),
    "ssp": Spelling(rules.ssp, "limits how many iterations workers may be ahead of the slowest"),
    "rennala": Spelling(rules.rennala, "a step for every BATCH gradients at one model"),
    "malenia": Spelling(rules.malenia, "rennala for data that differ between workers"),
    "ringmaster": Spelling(rules.ringmaster, "asgd that discards gradients older than MAX_DELAY"),
    "ringleader": Spelling(rules.ringleader, "asynchronous, with equal weight for every worker"),
    "dude": Spelling(rules.dude, "the latest gradient of every worker in every step"),
    "ad_psgd": Spelling(_ad_psgd, "averages with one neighbor at a time, without waiting"),
    "d_psgd": Spelling(_d_psgd, "averages with all neighbors and waits for them only"),
    "delay_by_one": Spelling(rules.delay_by_one, "synchronous; averages models while the gradient is computed"),
    "hop": Spelling(_hop, "sends models to neighbors in a graph; queues bound how far workers drift apart"),
    "prague": Spelling(_prague, "averages models in changing groups"),
    "pipe_sgd": Spelling(rules.pipe_sgd, "synchronous, with all-reduces hidden behind the next computations"),
    "local_sgd": Spelling(rules.local_sgd, "local steps, averaged every sync_period"),
    "dasgd": Spelling(rules.dasgd, "local_sgd whose averages arrive after delay local steps"),
    "lasgd": Spelling(rules.lasgd, "local steps, averaged in the background without waiting"),
    "palsgd": Spelling(rules.palsgd, "local_sgd with pulls toward the last average"),
    "any_batch": Spelling(rules.any_batch, "rounds of WINDOW seconds, with however many gradients are ready"),
    "any_batch_gossip": Spelling(_any_batch_gossip, "any_batch, averaged with neighbors only"),
    "task_allocation": Spelling(rules.task_allocation, "synchronous, with shares by measured speed"),
    "ata": Spelling(rules.ata, "task_allocation that leaves out workers known to be slow"),
}
LAWS = {
    name: Spelling(getattr(durations, name), "")
    for name in ("constant", "exponential", "shifted_exponential", "lognormal")
}


def take_schedule(keywords: dict[str, Any]) -> dict[str, Any]:
    """Removes the arguments of a schedule from those of an optimizer, and returns them.

    Examples:
      >>> keywords = {"b2": 0.99, "schedule": "cosine"}
      >>> take_schedule(keywords), keywords
      ({'schedule': 'cosine'}, {'b2': 0.99})
    """
    return {name: keywords.pop(name) for name in SCHEDULE_ARGUMENTS if name in keywords}


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
    # Below zero it would climb, without a word.
    if not 0 <= rate < float("inf"):
        raise ValueError(f"optimizer {text!r}: the learning rate must be at least 0 and finite, got {rate!r}")
    if not given:
        return rate
    _check_schedule(text, given)
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


def _check_schedule(text: str, given: dict[str, Any]) -> None:
    """Checks the arguments of a schedule by themselves."""
    name, end = given.get("schedule", "constant"), given.get("end_factor", 0.0)
    if name not in SCHEDULES:
        refuse_name("schedule", f"{name}", f"{name}", SCHEDULES)
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
      >>> replace_rate("adamw:4e-3,0.8,schedule=cosine", 0.008), replace_rate("sgd:momentum=0.9,learning_rate=0.1", 1.0)
      ('adamw:0.008,0.8,schedule=cosine', 'sgd:1,momentum=0.9')
    """
    name, _, rest = text.partition(":")
    # The rate comes first, or by name.
    parts = rest.split(",")
    kept = parts if "=" in parts[0] else parts[1:]
    kept = [part for part in kept if part.partition("=")[0].strip() != "learning_rate"]
    return ",".join([f"{name}:{rate:g}", *kept])
