"""The suites of `jaxdist compare`: the compression family, and the methods that synchronize every `H` steps."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core.checks import check_range
from ..models.base import Workload
from ..results import RunResult
from ..spellings.parse import parse_method
from .starts import Start, begin_at
from .train import Run, prepare

# The spellings of each family. `exact` is the baseline and comes first.
COMPRESSION: dict[str, tuple[str, ...]] = {
    "plain": ("exact", "f16", "bf16"),
    "blocks": ("int8", "fp8", "mxfp8", "min_max_uint8", "int4:rounding=stochastic", "ef:mxfp4", "natural"),
    "levels": ("qsgd:8", "qsgd:4", "qsgd:3", "qsgd:2", "nuqsgd:4", "alq:3", "amq:3", "terngrad"),
    "signs": ("sign", "ef:sign", "ef:drive"),
    "sparse": (
        "top_k:0.01",
        "ef:top_k:0.1",
        "ef:top_k:0.01",
        "ef:block_top_k:0.01",
        "ef:top_k:0.02+qsgd:4",
        "ef:random_k:0.05",
        "gspar:0.1",
    ),
    "low rank": ("power_sgd:2", "ef:power_sgd:1", "ef:power_sgd:2", "ef:power_sgd:4", "ef:power_sgd:2,one_sided=True"),
    "sums": ("two_shot:qsgd:8", "two_shot:qsgd:4", "ef:two_shot:sign", "loco:int4", "intsgd:8", "integer_sum:8"),
    "optimizers": ("demo:1e-3", "dion:3e-2,rank=4", "one_bit_adam:1e-3,freeze_step=50", "qadam:1e-3,warmup_steps=50"),
}
PERIODS = (8, 32, 128)
WORKERS = (4, 8)
# What `--suite local` trains by default: a run long enough for a synchronous start and for rounds to the end of a
# cosine, of a model that takes few milliseconds a step on a CPU.
LOCAL_MODEL = "gpt:tiny,context=32"
LOCAL_STEPS = 2560
LOCAL_OPTIMIZER = "adamw:4e-3,b2=0.99,schedule=cosine,warmup_steps=100,end_factor=0.05"
LOCAL_RATES = (4e-3, 8e-3)
START_SHARE = 5  # the start is a fifth of the run
# The spelling of each method with a place for H, and the shortest H that it takes. The baseline comes first.
METHODS: dict[str, tuple[str, int]] = {
    "exact": ("exact", 0),
    "Local SGD": ("local_sgd:H={H}", 1),
    "SlowMo": ("slowmo:H={H},momentum=0.5,buffers=maintain", 1),
    "DiLoCo": ("diloco:H={H},momentum={momentum}", 1),
    "streaming DiLoCo": ("streaming_diloco:H={H},fragments=4,momentum={momentum}", 4),
    "DiLoCo, 4 bits": ("diloco:H={H},momentum={momentum}/two_shot:qsgd:4", 1),
    "SparseLoCo": ("sparse_loco:H={H}", 1),
}


class SeedSpread(NamedTuple):
    """The numbers of one reducer over several seeds."""

    name: str  # the spelling
    family: str  # the key in `COMPRESSION`; empty outside the suite
    wire_bytes: float  # bytes sent by one worker in a step
    held_out: dict[str, np.ndarray]  # each metric of the evaluation, with one value for each seed
    difference: np.ndarray  # held-out loss minus the baseline's of the same seed
    milliseconds: float  # the median step of all seeds


class Cell(NamedTuple):
    """One method at one `H`."""

    method: str  # a key of `METHODS`
    period: int  # `H`; 0 for the baseline
    rate: float  # the learning rate inside
    spread: SeedSpread  # the numbers over the seeds
    rounds_bytes: float  # bytes sent by one worker in a step after the start
    steps: np.ndarray  # the steps of the evaluations during training
    losses: np.ndarray  # held-out loss at each of them, mean over the seeds
    units: int  # tokens or images in a step


def list_reducers() -> tuple[str, ...]:
    """All spellings of the compression suite."""
    return tuple(name for family in COMPRESSION.values() for name in family)


def collect_seeds(results: Sequence[RunResult], baseline: Sequence[RunResult]) -> SeedSpread:
    """Collects the runs of one reducer, one for each seed, and those of the baseline in the same order."""
    name = results[0].name
    held_out = {key: np.array([result.held_out[key] for result in results]) for key in results[0].held_out}
    exact = np.array([result.held_out["loss"] for result in baseline])
    # The median ignores the first steps, which are slower.
    seconds = [record.seconds for result in results for record in result.records]
    return SeedSpread(
        name=name,
        family=next((family for family, names in COMPRESSION.items() if name in names), ""),
        wire_bytes=float(np.mean([result.wire_bytes for result in results])),
        held_out=held_out,
        difference=held_out["loss"] - exact,
        milliseconds=1e3 * float(np.median(seconds)),
    )


def pareto_front(spreads: Sequence[SeedSpread], key: str = "loss") -> list[SeedSpread]:
    """The reducers that no other beats in both bytes and the mean of `key`, from the fewest bytes to the most."""
    # From the fewest bytes up, a reducer is on the front if its cost is the lowest so far.
    best, kept = np.inf, []
    for spread in sorted(spreads, key=lambda spread: (spread.wire_bytes, _cost(spread, key))):
        if _cost(spread, key) < best:
            best = _cost(spread, key)
            kept.append(spread)
    return kept


def _cost(spread: SeedSpread, key: str) -> float:
    """The mean if lower is better, as for a loss, and minus the mean otherwise; NaN is worst."""
    mean = float(spread.held_out[key].mean())
    return np.inf if np.isnan(mean) else mean if key == "loss" else -mean


def check_sweep(periods: Sequence[int], workers: Sequence[int], seeds: int) -> None:
    """Raises ValueError if the options of `--suite local` are not positive."""
    if not periods or min(periods) < 1:
        raise ValueError(f"--periods needs positive numbers, got {tuple(periods)}")
    if not workers or min(workers) < 1:
        raise ValueError(f"--workers needs positive numbers, got {tuple(workers)}")
    check_range("--seeds", seeds, 1, ends="[]")


def evaluation_interval(steps: int, periods: Sequence[int]) -> int:
    """About an eighth of the steps, in whole rounds of the `H` that is drawn if there are at least four of them."""
    shown = shown_period(sorted(periods))
    return max(shown, steps // 8 // shown * shown) if steps >= 4 * shown else max(1, steps // 8)


def shown_period(periods: Sequence[int]) -> int:
    """The `H` of the loss curves: 32, or the one in the middle."""
    return 32 if 32 in periods else periods[len(periods) // 2]


def check_start(start: int, steps: int, periods: Sequence[int]) -> None:
    """Raises ValueError if a synchronous start leaves no round of the longest `H`."""
    longest = max(periods)
    if not 0 <= start <= steps - longest:
        raise ValueError(
            f"--start {start} of --steps {steps} leaves no round of H = {longest}: give more steps, a start of at most "
            f"{max(0, steps - longest)}, or shorter --periods"
        )


def list_sweep(periods: Sequence[int], *, start: int) -> list[tuple[str, int, str]]:
    """Name, `H` and spelling of all runs: `("exact", 0, "exact")`, `("Local SGD", 8, "local_sgd:H=8")`, ..."""
    found = []
    # The default of `diloco` with and without `warmup_steps`.
    momentum = 0.9 if start else 0.5
    for method, (template, least) in METHODS.items():
        # The baseline has no period; fragments need one that is at least their number.
        possible = [period for period in sorted(periods) if period >= least] if least else [0]
        found += [(method, period, template.format(H=period, momentum=momentum)) for period in possible]
    return found


def prepare_sweep(
    workload: Workload, optimizer: str, periods: Sequence[int], *, start: int, steps: int | None = None, **settings: Any
) -> Iterator[tuple[str, int, str, Run]]:
    """Prepares one run after the other; a method without fragments is compiled once for all `H`.

    Yields `(method, H, spelling, Run)`, the baseline first; `start` is the number of synchronous steps that `begin`
    will put before the others, `steps` the length of a learning-rate schedule in `optimizer`, `settings` are `mesh`,
    `batch_size` and `seed` of `prepare`.
    """
    shared: tuple[str, Run] | None = None
    for method, period, spelling in list_sweep(periods, start=start):
        if shared and shared[0] == method and shared[1].program.any_period:
            # H is an argument of the compiled step: `begin` makes the state anew.
            run = shared[1]._replace(sync_period=period)
        else:
            # Fragments are synchronized at steps that are fixed when the program is traced.
            any_period = bool(period) and "fragments" not in spelling
            run = prepare(
                workload, **parse_method(spelling, optimizer, steps)._asdict(), any_period=any_period, **settings
            )
            shared = (method, run)
        yield method, period, spelling, run


def begin(run: Run, period: int, seed: int, start: Start | None) -> Run:
    """The run of a seed, from its synchronous start if there is one; the baseline starts from scratch."""
    if start is not None and period:
        return begin_at(run, start, sync_period=period, seed=seed)
    return run.with_seed(seed)


def collect_cell(
    method: str,
    period: int,
    results: Sequence[RunResult],
    baseline: Cell | None,
    run: Run,
    *,
    rate: float,
) -> Cell:
    """Collects the runs of one method at one `H`, one for each seed."""
    spread = collect_seeds(results, results)
    if baseline is not None:
        spread = spread._replace(difference=spread.held_out["loss"] - baseline.spread.held_out["loss"])
    losses = np.array([[evaluation.held_out["loss"] for evaluation in result.evaluations] for result in results])
    steps = np.array([evaluation.step for evaluation in results[0].evaluations])
    # The records of a method with a start begin after it.
    local = [record.wire_bytes for result in results for record in result.records]
    sizes = float(np.mean(local)), steps, losses.mean(axis=0), run.units_per_step
    return Cell(method, period, rate, spread, *sizes)


def choose_rates(cells: Sequence[Cell]) -> list[Cell]:
    """Keeps each method at each `H` at its best rate, that of the lowest mean loss, against the best baseline.

    Examples:
      >>> spread = SeedSpread("exact", "", 8.0, {"loss": np.array([1.0])}, np.zeros(1), 1.0)
      >>> better = spread._replace(held_out={"loss": np.array([0.5])})
      >>> cell = Cell("exact", 0, 0.1, spread, 8.0, np.array([1]), np.array([1.0]), 1)
      >>> [best.rate for best in choose_rates([cell, cell._replace(rate=0.2, spread=better)])]
      [0.2]
    """
    best: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        key = cell.method, cell.period
        if key not in best or _cost(cell.spread, "loss") < _cost(best[key].spread, "loss"):
            best[key] = cell
    exact = next(iter(best.values())).spread.held_out["loss"]
    return [
        cell._replace(spread=cell.spread._replace(difference=cell.spread.held_out["loss"] - exact))
        for cell in best.values()
    ]
