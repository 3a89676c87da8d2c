"""Writes the table of `reference/compositions.md`: what each reducer supports, and why it does not support the rest.

python docs/compositions.py
"""

import re
from pathlib import Path

import jaxdist as jd
from jaxdist.reducers import Use, reason_against

PAGE = Path(__file__).parent / "reference" / "compositions.md"
# From the head of the table to the end of the last note.
TABLE = re.compile(r"^- \*feedback\*:.*^\d+\. [^\n]*$", re.MULTILINE | re.DOTALL)
jc, jr = jd.compressors, jd.reducers


def by_rank(path, leaf):
    """The label of a leaf for `per_leaf`."""
    return "matrix" if leaf.ndim > 1 else "vector"


REDUCERS = {
    "exact()": jd.exact,
    "compressed(cast(bfloat16))": lambda: jd.compressed(jc.cast("bfloat16")),
    "compressed(qsgd(4))": lambda: jd.compressed(jd.qsgd(4)),
    "compressed(top_k(0.01))": lambda: jd.compressed(jd.top_k(0.01)),
    "compressed(scaled_sign())": lambda: jd.compressed(jc.scaled_sign()),
    "compressed(sign())": lambda: jd.compressed(jc.sign()),
    "compressed(qsgd(4), divide_by_inflation=True)": lambda: jd.compressed(jd.qsgd(4), divide_by_inflation=True),
    "alq(3)": lambda: jr.alq(3),
    "amq(3)": lambda: jr.amq(3),
    "power_sgd(4)": lambda: jd.power_sgd(4),
    "two_shot(qsgd(4))": lambda: jd.two_shot(jd.qsgd(4)),
    "two_shot(scaled_sign())": lambda: jd.two_shot(jc.scaled_sign()),
    "two_shot(int8(), server_feedback=False)": lambda: jd.two_shot(jc.int8(), server_feedback=False),
    "ring(qsgd(4))": lambda: jr.ring(jd.qsgd(4)),
    "majority_vote()": jr.majority_vote,
    "integer_sum()": jr.integer_sum,
    "intsgd()": jr.intsgd,
    "median()": jr.median,
    "row_sparse(1)": lambda: jr.row_sparse(1),
    "trimmed_mean(1)": lambda: jr.trimmed_mean(1),
    "dgc(0.01)": lambda: jr.dgc(0.01),
    "dgc(0.01, clip_norm=1.0)": lambda: jr.dgc(0.01, clip_norm=1.0),
    "error_feedback(compressed(top_k(0.01)))": lambda: jd.error_feedback(jd.compressed(jd.top_k(0.01))),
    "error_feedback(power_sgd(4))": lambda: jd.error_feedback(jd.power_sgd(4)),
    "error_feedback(two_shot(qsgd(4)))": lambda: jd.error_feedback(jd.two_shot(jd.qsgd(4))),
    "loco(two_shot(qsgd(4)))": lambda: jr.loco(jd.two_shot(jd.qsgd(4))),
    "compute_visible(compressed(top_k(0.01)))": lambda: jr.compute_visible(jd.compressed(jd.top_k(0.01))),
    "ef21(compressed(top_k(0.01)))": lambda: jr.ef21(jd.compressed(jd.top_k(0.01))),
    "hierarchical(inner=exact(), outer=exact())": lambda: jd.hierarchical(inner=jd.exact(), outer=jd.exact()),
    "hierarchical(inner=exact(), outer=median())": lambda: jd.hierarchical(inner=jd.exact(), outer=jr.median()),
    "hierarchical(inner=exact(), outer=two_shot(qsgd(4)))": lambda: jd.hierarchical(
        inner=jd.exact(), outer=jd.two_shot(jd.qsgd(4))
    ),
    'per_leaf(..., {"matrix": power_sgd(4), "vector": exact()})': lambda: jr.per_leaf(
        by_rank, {"matrix": jd.power_sgd(4), "vector": jd.exact()}
    ),
    'per_leaf(..., {"matrix": median(), "vector": exact()})': lambda: jr.per_leaf(
        by_rank, {"matrix": jr.median(), "vector": jd.exact()}
    ),
    "reducer_schedule(exact(), two_shot(qsgd(4)), 100)": lambda: jr.reducer_schedule(
        jd.exact(), jd.two_shot(jd.qsgd(4)), 100
    ),
    "accordion(power_sgd(4), power_sgd(1), ...)": lambda: jr.accordion(
        jd.power_sgd(4), jd.power_sgd(1), epoch_steps=10, interval_steps=10
    ),
    "with_regime(exact(), ...)": lambda: jr.with_regime(jd.exact(), epoch_steps=10, interval_steps=10),
    "with_stats(exact())": lambda: jr.with_stats(jd.exact()),
    "bucketed(exact())": lambda: jr.bucketed(jd.exact()),
    "partitioned(exact())": lambda: jr.partitioned(jd.exact()),
}


def table():
    """The lines of the table, above it what its columns are, and below it its notes, each reason once."""
    uses, notes = list(Use), {}
    names = [use.name.lower().replace("_", " ") for use in uses]
    lines = [f"- *{name}*: {use.value}" for name, use in zip(names, uses, strict=True)]
    lines += ["", "| reducer | " + " | ".join(names) + " |", "|---" * (len(uses) + 1) + "|"]
    for name, make in REDUCERS.items():
        reducer, cells = make(), []
        for use in uses:
            reason = reason_against(use, reducer)
            cells.append("yes" if reason is None else f"no ({notes.setdefault(reason, len(notes) + 1)})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{number}. {reason}." for reason, number in notes.items())]


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: "\n".join(table()), PAGE.read_text()))
