"""The report of `peers.py`, from its records."""

from typing import Any

HEAD = """# Beside other systems

`python benchmarks/peers.py`: what other systems have published, on the same problems; records in
`peers.json`, machine in `environment.json`.
"""


def write(found: dict[str, Any]) -> str:
    makers = {"gossip": gossip}
    return "\n".join([HEAD, *(make(found[name]) for name, make in makers.items() if name in found)])


def gossip(found: dict[str, Any]) -> str:
    lines = [
        "## BlueFog",
        "",
        "Two least-squares problems of BlueFog's tutorial (github.com/Bluefog-Lib/bluefog-tutorial, sections 3.5",
        "and 4.3), whose figures show one draw of the data: relative error of worker 0 after",
        f"{found['steps']} steps, float64, on {found['rows'][0]['draws']} draws. *Difference* is the largest between",
        "our models and BlueFog's recursion, as its tutorial writes it, in NumPy on the same draws. BlueFog 0.3.0",
        "builds only with MPI, which this machine has not (`Cannot find MPI command`): its speed is not compared. In",
        "the tutorial's figure exact diffusion needs about 97 steps to 1e-10; it does not say for how many workers;",
        "eight are taken here.",
        "",
        "| rule | BlueFog's figure | ours, median | middle 80 % of draws | difference | steps to 1e-10 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        published = f"{row['published']:.1e}" if row["published"] else ""
        difference = f"{row['largest_difference']:.0e}" if "largest_difference" in row else ""
        steps = f"{row['steps_to_1e-10']:.0f}" if row["steps_to_1e-10"] is not None else ""
        lines.append(
            f"| {row['rule']} | {published} | {row['median']:.1e} | {row['low']:.1e} to {row['high']:.1e} | "
            f"{difference} | {steps} |"
        )
    return "\n".join([*lines, ""])
