"""Methods for workers of unequal speed beside their baselines, in virtual seconds: one function for each method.

python benchmarks/asynchronous uneven biased --out benchmarks/reports/2026-11-uneven
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record
from digits_network import SEEDS, TUNING_SEED, accuracy, digits, losses, network

import jaxdist as jd
from jaxdist.asynchronous import durations, links, replay, rules


def summary(values):
    """The mean, the least, the most and all; null where a run never got there."""
    values = np.asarray(values, np.float64)
    found = {"mean": float(values.mean()), "least": float(values.min()), "most": float(values.max())}
    found = {name: value if np.isfinite(value) else None for name, value in found.items()}
    return found | {"values": [round(value, 5) if np.isfinite(value) else None for value in values.tolist()]}


# Biased Local SGD: two slow workers of ten, 32 times slower, as the two CPUs beside eight GPUs of the paper.

SLOW, FAST_PERIOD, BATCH, RATES = 32, 32, 16, (0.05, 0.1, 0.2, 0.4, 0.8)
BIASED_SEEDS = tuple(range(6))


def train_biased(periods, pool, rounds, train, held_out):
    """Training loss, held-out loss and accuracy after each round: `[1 + seeds, rates, rounds, 3]`."""
    workers, period = len(periods), max(periods)
    sampling = jd.local_sgd.loss_biased_sampling(len(train[1]), pool=pool)
    train, held_out = jax.tree.map(jnp.asarray, (train, held_out))

    def worker(index, seed, rate):
        tx = jd.local_sgd.local_sgd(optax.sgd(rate, momentum=0.9), sync_period=period)
        params = network(jax.random.key(seed))

        def step(state, count):
            x, opt, table = state
            active = count % period < jnp.array(periods)[index]
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), index)
            drawn = sampling.draw(table, key, BATCH, index >= workers - 2)
            images, labels = (part[drawn] for part in train)
            each, pull_back = jax.vjp(lambda x: losses(x, images, labels), x)
            updates, opt = tx.update(pull_back(jnp.full(BATCH, 1 / BATCH))[0], opt, x, active=active)
            table = sampling.record(table, drawn, each, count % period == period - 1, active)
            return (optax.apply_updates(x, updates), opt, table), None

        def run_round(state, number):
            state, _ = jax.lax.scan(step, state, number * period + jnp.arange(period))
            mean = jd.local_sgd.global_params(state[1])
            found = losses(mean, *train).mean(), losses(mean, *held_out).mean(), accuracy(mean, *held_out)
            return state, jnp.stack(found)

        start = (params, tx.init(params), sampling.init())
        return jax.lax.scan(run_round, start, jnp.arange(rounds))[1]

    every = jax.vmap(worker, in_axes=(0, None, None), axis_name="data")
    every = jax.vmap(jax.vmap(every, in_axes=(None, None, 0)), in_axes=(None, 0, None))
    given = jnp.arange(workers), jnp.array((TUNING_SEED, *BIASED_SEEDS)), jnp.array(RATES)
    return np.asarray(jax.jit(every)(*given))[:, :, 0]


def long_tail(train):
    """Of the digits 5 to 9 one image in ten, which are then the hard ones."""
    kept = (train[1] < 5) | (np.arange(len(train[1])) % 10 == 0)
    return tuple(part[kept] for part in train)


def biased():
    train, held_out = digits()
    found = []
    for data, images in (("all digits", train), ("few of 5 to 9", long_tail(train))):
        everything, mixed = len(images[1]), [FAST_PERIOD] * 8 + [1] * 2
        # H_i of each worker, the pool, the virtual seconds of a round, and the rounds.
        cases = {
            "synchronous SGD": ([1] * 10, everything, SLOW, 64),
            "local SGD, H = 8": ([8] * 10, everything, 8 * SLOW, 8),
            "H = 32 and 1, uniform": (mixed, everything, SLOW, 10),
            "H = 32 and 1, hardest fifth": (mixed, everything // 5, SLOW, 10),
            "H = 32 and 1, hardest thirtieth": (mixed, everything // 30, SLOW, 10),
            "H = 32 on the eight fast workers only": ([FAST_PERIOD] * 8, everything, SLOW, 10),
        }
        for name, case in cases.items():
            found.append({"data": data, "method": name} | measure_biased(*case, images, held_out))
            print(json.dumps(found[-1]), flush=True)
    return found


def measure_biased(periods, pool, seconds, rounds, train, held_out):
    """The rate with the lowest training loss on the tuning seed, and the other seeds at that rate."""
    curves = train_biased(periods, pool, rounds, train, held_out)
    best = int(np.nanargmin(curves[0, :, -1, 0]))
    curves = curves[1:, best]
    reached = [np.flatnonzero(curve < 0.2) for curve in curves[:, :, 1]]
    row = {"rate": RATES[best], "seconds": seconds * rounds}
    row |= {"training loss": summary(curves[:, -1, 0]), "loss": summary(curves[:, -1, 1])}
    row |= {"accuracy": summary(100 * curves[:, -1, 2])}
    return row | {"seconds to 0.2": summary([seconds * (1 + at[0]) if len(at) else np.inf for at in reached])}


# Allocation of 32 microbatches a step: 16 workers, of which four are 2, four 5 and four 30 times slower.

SPEEDS = np.repeat([1.0, 2.0, 5.0, 30.0], 4)
STEPS, MICROBATCHES = 300, 32


def allocation():
    """Seconds of a step and seconds computed in it, by all workers and by the slowest kind; without arrays."""
    law = durations.shifted_exponential(0.5, 0.5)
    scaled = law._replace(
        draw=lambda rng, w, first, count, state: scale_draws(law.draw(rng, w, first, count, state), w)
    )
    sgd = optax.sgd(0.1)
    cases = {
        "even": rules.task_allocation(MICROBATCHES, sgd, seconds=[1.0] * 16),
        "measured (`task_allocation`)": rules.task_allocation(MICROBATCHES, sgd),
        "given (`task_allocation(seconds=)`)": rules.task_allocation(MICROBATCHES, sgd, seconds=SPEEDS.tolist()),
        "`ata(confidence=0.1)`": rules.ata(MICROBATCHES, sgd, confidence=0.1),
        "`ata(confidence=0.5)`": rules.ata(MICROBATCHES, sgd, confidence=0.5),
        "`ata(confidence=10.87)`, in theory": rules.ata(MICROBATCHES, sgd, confidence=4 * np.e),
        "`rennala`": rules.rennala(MICROBATCHES, sgd),
    }
    found = []
    for name, rule in cases.items():
        rows = []
        for seed in SEEDS:
            settings = {"durations": scaled, "workers": 16, "seed": seed, "record_events": False}
            clock = replay.simulator(rule, **settings)
            half = clock.advance(clock.init(), steps=STEPS // 2)
            first, run = clock.result(half), clock.result(clock.advance(half, steps=STEPS))
            computed = run.computing * run.seconds - first.computing * first.seconds
            rows.append(
                np.array([first.seconds, run.seconds - first.seconds, computed.sum(), computed[12:].sum()])
                / (STEPS // 2)
            )
        names = ("first half", "second half", "computed", "by the slowest four")
        found.append({"shares": name} | {key: summary(column) for key, column in zip(names, np.array(rows).T)})
        print(json.dumps(found[-1]), flush=True)
    return found


def scale_draws(result, worker):
    drawn, state = result
    return drawn * SPEEDS[worker], state


# Prague on four nodes of four workers, with links between nodes that are ten times slower than inside.


def softmax_task(train, held_out, workers, seed, concentration, batch=16):
    """Softmax regression on digits whose mixture of labels differs between workers."""
    parts = jd.runtime.dirichlet_split(train[1], workers, concentration=concentration, seed=seed)

    def loss(params, data):
        logits = data[0] @ params["w"] + params["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()

    def draw(seed, worker, job):
        rows = np.random.default_rng((seed, worker, job)).choice(parts[worker], batch)
        return train[0][rows], train[1][rows]

    evaluate = jax.jit(lambda params: loss(params, held_out))
    start = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    return replay.Task(start, loss, draw, lambda params: float(evaluate(params)))


def nodes():
    train, held_out = digits()
    node = np.arange(17) // 4
    # A model of 2600 bytes takes 0.1 s inside a node and 1 s between nodes.
    wire = links.alpha_beta(1e-3, np.where(node[:, None] == node, 2.6e4, 2.6e3))
    found = []
    for groups in ("static", "smart"):
        for node_size in (None, 4):
            rule = rules.prague(optax.sgd(0.2), group_size=4, groups=groups, node_size=node_size)
            rows = []
            for seed in SEEDS:
                task = softmax_task(train, held_out, 16, seed, 0.5)
                law = durations.lognormal(1.0, 0.2)
                settings = {"workers": 16, "durations": law, "links": wire, "seed": seed, "record_events": False}
                run = replay.run(rule, task, seconds=120, evaluate_every=2, **settings)
                reached = replay.time_to_target(run, 0.5, persist=3)
                rows.append([len(run.trace.gradients) / run.seconds, run.losses[-1], reached])
            names = ("gradients a second", "held-out loss", "seconds to 0.5")
            row = {"groups": groups, "node_size": node_size}
            found.append(row | {key: summary(column) for key, column in zip(names, np.array(rows).T)})
            print(json.dumps(found[-1]), flush=True)
    return found


METHODS = {"biased": biased, "allocation": allocation, "nodes": nodes}


def add_options(parser):
    parser.add_argument("method", choices=tuple(METHODS))
    parser.add_argument("--out", type=Path)


def main(given):
    write_record(given.out, given.method, METHODS[given.method]())
