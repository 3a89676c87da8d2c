"""Prints the tables of `explanation/compression.md` on what NaN and infinity become, from runs of the library.

python docs/not_finite.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist as jd

# Enough entries for reductions that lose NaN in long arrays, as a matrix that low rank compresses.
SHAPE = (100, 50)
# An entry that `random_k` does not draw.
WORKERS, PLACE = 4, 4322
VALUES = (np.nan, np.inf, -np.inf)
jc, jr = jd.compressors, jd.reducers

CODES = {
    "cast(bfloat16)": lambda: jc.cast(jnp.bfloat16),
    "cast(float16)": lambda: jc.cast(jnp.float16),
    "cast(float8_e4m3fn)": lambda: jc.cast(jnp.float8_e4m3fn),
    "natural()": jc.natural,
    "int8()": jc.int8,
    "int4()": jc.int4,
    "min_max_uint8()": jc.min_max_uint8,
    "fp8()": jc.fp8,
    "mxfp8()": jc.mxfp8,
    "mxfp4()": jc.mxfp4,
    "dynamic_fp8()": jc.dynamic_fp8,
    "e3m0()": jc.e3m0,
    "qsgd(4)": lambda: jc.qsgd(4),
    "nuqsgd(4)": lambda: jc.nuqsgd(4),
    "terngrad()": jc.terngrad,
    "scaled_sign()": jc.scaled_sign,
    "one_bit()": jc.one_bit,
    "two_means()": jc.two_means,
    "drive()": jc.drive,
    "sign()": jc.sign,
    "top_k(0.1)": lambda: jc.top_k(0.1),
    "block_top_k(0.1)": lambda: jc.block_top_k(0.1),
    "gspar(0.1)": lambda: jc.gspar(0.1),
    "random_k(0.1)": lambda: jc.random_k(0.1),
}
REDUCERS = {
    "exact()": jd.exact,
    "compressed(int8())": lambda: jd.compressed(jc.int8()),
    "compressed(top_k(0.1))": lambda: jd.compressed(jc.top_k(0.1)),
    "compute_visible(exact())": lambda: jr.compute_visible(jd.exact()),
    "two_shot(int8())": lambda: jd.two_shot(jc.int8()),
    "ring(qsgd(4))": lambda: jr.ring(jc.qsgd(4)),
    "error_feedback(compressed(int4()))": lambda: jd.error_feedback(jd.compressed(jc.int4())),
    "error_feedback(compressed(top_k(0.1)))": lambda: jd.error_feedback(jd.compressed(jc.top_k(0.1))),
    "ef21(compressed(top_k(0.1)))": lambda: jr.ef21(jd.compressed(jc.top_k(0.1))),
    "dgc(0.1)": lambda: jr.dgc(0.1),
    "loco(two_shot(int4()))": lambda: jr.loco(jd.two_shot(jc.int4())),
    "error_feedback(power_sgd(4))": lambda: jd.error_feedback(jd.power_sgd(4)),
    "alq(3)": lambda: jr.alq(3),
    "integer_sum()": jr.integer_sum,
    "intsgd()": jr.intsgd,
    "majority_vote()": jr.majority_vote,
    "median()": jr.median,
    "row_sparse(1)": lambda: jr.row_sparse(1),
    "trimmed_mean(1)": lambda: jr.trimmed_mean(1),
}


def gaussian(number):
    """A gradient of one worker."""
    return np.random.default_rng(number).standard_normal(SHAPE).astype(np.float32)


def with_value(x, value):
    """The gradient with one entry replaced."""
    return np.where(np.arange(x.size).reshape(x.shape) == PLACE, np.float32(value), x)


def extent(x):
    """How many entries are not finite, in words."""
    count = int((~np.isfinite(x)).sum())
    return {0: "none", 1: "the entry", x.size: "the array"}.get(count, f"{count} entries")


def kinds(x):
    """What the entries that are not finite are."""
    found = [name for name, mask in (("NaN", np.isnan(x)), ("∞", x == np.inf), ("-∞", x == -np.inf)) if mask.any()]
    return ", ".join(found).replace("∞, -∞", "±∞") or "lost"


def code_row(name):
    """A row of the first table: of how many entries a code loses the numbers, and what they become."""
    code = CODES[name]()
    run = jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))
    decoded = [np.asarray(run(with_value(gaussian(0), value))) for value in VALUES]
    return " | ".join([f"| `{name}`", extent(decoded[0]), *map(kinds, decoded)]) + " |"


def reducer_row(name):
    """A row of the second table: what NaN of one worker does to the mean, and to that of the next step."""
    reducer = REDUCERS[name]()
    like = jax.ShapeDtypeStruct(SHAPE, jnp.float32)

    def step(state, batch):
        extras = jr.Extras(params=jnp.ones(SHAPE))
        reduced, kept = reducer.reduce(batch[0], state["kept"]["reducer"], jd.comm.over("data"), extras)
        return {"kept": {"reducer": kept}, "mean": reduced.mean}, ()

    def make_state():
        return {"kept": {"reducer": reducer.init(like)}, "mean": jnp.zeros(SHAPE)}

    state, run = jd.init_state(make_state, WORKERS), jd.simulate(step, WORKERS)
    cells = []
    # A step before, since first steps are often exact; one with NaN on one worker; and one after it.
    for number in range(3):
        batch = np.stack([gaussian(number * WORKERS + worker) for worker in range(WORKERS)])
        if number == 1:
            batch[1] = with_value(batch[1], np.nan)
        state, _ = run(state, batch)
        cells.append(extent(np.asarray(state["mean"])))
    return f"| `{name}` | {cells[1]} | {cells[2]} |"


def main():
    """Prints both tables."""
    print("| code | not finite | NaN becomes | ∞ becomes | -∞ becomes |\n|---|---|---|---|---|")
    print(*map(code_row, CODES), sep="\n")
    print("\n| reducer | in the mean | in the mean of the next step |\n|---|---|---|")
    print(*map(reducer_row, REDUCERS), sep="\n")


if __name__ == "__main__":
    main()
