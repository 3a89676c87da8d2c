"""Local SGD and DiLoCo at H = 32 against synchronous AdamW, trained to the end of a cosine schedule.

    python benchmarks/local_long.py --workers 8 --out benchmarks/reports/NAME

The suite of the command line has a constant learning rate and stops early, where workers that step by themselves are
far behind. Here the rate decays, as in the papers. Every method has the same tokens and each of the same inner rates;
the best rate counts. Bytes are read from the compiled programs.
"""

import argparse
import json
from pathlib import Path

import jax
import optax

import jaxdist as jd

PERIOD = 32


def methods():
    """Name -> (reducer, what makes the optimizer from the inner one, H)."""
    return {
        "synchronous": (jd.exact(), lambda inner: inner, None),
        "local_sgd": (None, lambda inner: jd.local_sgd.local_sgd(inner, sync_period=PERIOD), PERIOD),
        "diloco": (None, lambda inner: jd.local_sgd.diloco(inner, sync_period=PERIOD, learning_rate=0.7), PERIOD),
        "diloco, 4 bits": (
            None,
            lambda inner: jd.local_sgd.diloco(
                inner, sync_period=PERIOD, learning_rate=0.7, reducer=jd.two_shot(jd.qsgd(4))
            ),
            PERIOD,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3072)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--model", default="gpt:tiny,layers=1,width=32,context=32,heads=2")
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-3, 1e-2])
    parser.add_argument("--methods", nargs="+", default=list(methods()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jd.runtime.use_cpu_devices(options.workers)

    from jaxdist._cli.spellings import parse
    from jaxdist._cli.training import train

    workload = parse.parse_workload("text", options.model)
    mesh = jd.make_mesh({"data": options.workers})
    found = []
    for name in options.methods:
        reducer, make, period = methods()[name]
        for rate in options.rates:
            schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 100, options.steps, 0.05 * rate)
            inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
            run = train.prepare(workload, reducer, make(inner), mesh=mesh, batch_size=options.batch, sync_period=period)
            state = run.state
            for step in range(options.steps):
                state, _ = run.step(state, run.batch(step))
            loss = run.evaluate(state)["loss"]
            row = {
                "method": name,
                "inner_rate": rate,
                "held_out_loss": loss,
                "bytes_per_step": run.wire_bytes,
                "tokens": options.steps * run.units_per_step,
                "parameters": run.parameters,
                "workers": options.workers,
                "jax": jax.__version__,
            }
            found.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"long_{options.workers}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        (options.out / f"long_{options.workers}.md").write_text(table(found))


def table(rows: list[dict]) -> str:
    """The best inner rate of each method."""
    best = {}
    for row in rows:
        if row["method"] not in best or row["held_out_loss"] < best[row["method"]]["held_out_loss"]:
            best[row["method"]] = row
    base = rows[0] if "synchronous" not in best else best["synchronous"]
    lines = [
        "| method | inner rate | bytes a step | fewer bytes | held-out loss | against synchronous |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in best.values():
        fewer = base["bytes_per_step"] / row["bytes_per_step"]
        more = 100 * (row["held_out_loss"] / base["held_out_loss"] - 1)
        lines.append(
            f"| {row['method']} | {row['inner_rate']} | {row['bytes_per_step']:,.0f} | {fewer:,.1f}x | "
            f"{row['held_out_loss']:.4f} | {more:+.2f} % |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
