"""What the README and the guides quote is in a report of the repository."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY

from jaxdist.analysis.cost import CHIPS
from jaxdist.compressors.one_pass import TILE, WARPS

REPORTS = REPOSITORY / "benchmarks" / "reports"
LINKS = ("100 Mbit/s", "100 Mbit/s, 10 ms each way", "1 Gbit/s", "1 Gbit/s, 10 ms each way")
pytestmark = pytest.mark.skipif(not REPORTS.exists(), reason="a source distribution has no reports")


def find_rows(text: str) -> set[str]:
    """The rows of all tables."""
    return set(re.findall(r"^\|.*\|$", text, re.MULTILINE))


RACE = REPORTS / "2026-11-race"


def split_row(line: str) -> list[str]:
    """The cells of a row of a table, without emphasis."""
    return [cell.strip(" *") for cell in line.split("|")[1:-1]]


def find_race(problem: str, link: str, folder: Path = RACE) -> dict[str, dict[str, str]]:
    """What was measured in the race of a problem over a link: of each method, the first first, the cells by column."""
    table = (folder / "race.md").read_text().split(f"### {problem}, {link}\n")[1].split("###")[0]
    head, _, *rows = [split_row(line) for line in re.findall(r"^\|.*$", table, re.MULTILINE)]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def find_times(problem: str, link: str) -> dict[str, float]:
    """Seconds to the loss over a link, by method, the first first, of those that were trained to it."""
    race = find_race(problem, link).items()
    return {method: float(cells["seconds"]) for method, cells in race if cells["seconds"]}


def is_rounded(quoted: str, seconds: str) -> bool:
    """Whether whole seconds are those of a record, which has one more digit, rounded before."""
    return abs(int(quoted.removesuffix(" s")) - float(seconds)) < 0.55


def find_first(times: dict[str, float], *, ours: bool) -> float:
    """The seconds of the first of jaxdist's methods, or of the others."""
    return min(seconds for method, seconds in times.items() if method.startswith("jaxdist") == ours)


def find_race_tables(heading: str) -> list[list[list[str]]]:
    """The tables with methods in a section of the race's report: the rows of each."""
    section = (RACE / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    rows = [
        [split_row(line) for line in re.findall(r"^\| (?:jaxdist|PyTorch|Deep).*", t, re.MULTILINE)] for t in tables
    ]
    return [table for table in rows if table]


LANGUAGE_MODEL = "Language model of 4.9 M parameters, two hosts"
LARGER_MODEL = "Language model of 29.9 M parameters, two hosts"
CLASSIFIER = "Classifier of 10.5 M parameters, two hosts"


def test_times_to_a_loss_of_the_readme_are_those_of_the_report():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    for link in LINKS:
        times = find_times(LANGUAGE_MODEL, link)
        first = next(iter(times))
        assert times[first] == min(times.values())
        pattern = rf"over {link}: {re.escape(first)} in (\d+ s), PyTorch DDP in (\d+ s)"
        (quoted,) = re.findall(pattern, readme)
        assert is_rounded(quoted[0], str(times[first]))
        assert is_rounded(quoted[1], str(times["PyTorch DDP"]))


def test_times_of_the_home_page_are_those_of_the_report():
    page = " ".join((REPOSITORY / "docs" / "index.md").read_text().split())
    slow, fast = (find_race(LANGUAGE_MODEL, link) for link in ("100 Mbit/s", "1 Gbit/s"))
    (quoted,) = re.findall(r"jaxdist PowerSGD (\d+) s, PyTorch DDP (\d+) s", page)
    assert next(iter(slow)) == "jaxdist PowerSGD, rank 4"
    for seconds, method in zip(quoted, ("jaxdist PowerSGD, rank 4", "PyTorch DDP"), strict=True):
        assert is_rounded(seconds, slow[method]["seconds"])
    (quoted,) = re.findall(r"the same model takes (\d+) s, and (\d+) s with PyTorch DDP", page)
    for seconds, method in zip(quoted, (next(iter(fast)), "PyTorch DDP"), strict=True):
        assert is_rounded(seconds, fast[method]["seconds"])


def test_comparisons_of_times_in_the_readme_are_those_of_the_report():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    power_sgd, hook, ddp = "jaxdist PowerSGD, rank 4", "PyTorch PowerSGD hook, rank 4", "PyTorch DDP"
    times = {link: find_times(LANGUAGE_MODEL, link) for link in LINKS}
    ahead = {link: 1 - find_first(times[link], ours=True) / find_first(times[link], ours=False) for link in LINKS}
    behind, *percent = sorted(round(100 * share) for share in ahead.values())
    assert f"{percent[0]} to {percent[-1]} % faster than PyTorch's best over three of the links" in readme
    assert min(ahead, key=ahead.__getitem__) == LINKS[-1]
    assert next(iter(times[LINKS[-1]])) == "PyTorch post-local SGD, H=8"
    assert f"over 1 Gbit/s with delay PyTorch's post-local SGD is {-behind} % ahead" in readme
    slow = times["100 Mbit/s"]
    assert f"PowerSGD is {slow[ddp] / slow[power_sgd]:.1f} times faster than PyTorch DDP" in readme
    slow = find_times(LARGER_MODEL, "100 Mbit/s")
    assert next(iter(slow)) == power_sgd
    faster = (
        f"{slow[ddp] / slow[power_sgd]:.1f} times faster than DDP and {slow[hook] / slow[power_sgd]:.2f} times faster"
    )
    assert faster in readme
    fast = find_times(LARGER_MODEL, "1 Gbit/s")
    assert next(iter(fast)) == "PyTorch DDP, f16 hook"
    assert abs(1 - find_first(fast, ours=False) / find_first(fast, ours=True)) < 0.01
    assert "over 1 Gbit/s PyTorch's f16 hook and our best are level" in readme


@pytest.mark.parametrize(
    ("heading", "problem"), [("Which method is first", LANGUAGE_MODEL), ("The classifier", CLASSIFIER)]
)
def test_seconds_in_the_report_of_the_race_are_those_of_its_runs(heading, problem):
    (table,) = find_race_tables(heading)
    races = [find_race(problem, link) for link in LINKS]
    assert {row[0] for row in table} == set(races[0])
    for method, steps, *seconds in table:
        assert steps.split(" ")[0] == next(cells for head, cells in races[0][method].items() if "steps to" in head)
        for race, quoted in zip(races, seconds, strict=True):
            assert is_rounded(quoted, race[method]["seconds"])


def test_the_race_on_another_version_of_jax_is_that_of_its_runs():
    (table,) = find_race_tables("On jax 0.10.2")
    races = [find_race(LANGUAGE_MODEL, link, RACE / "jax_0_10_2") for link in LINKS]
    assert {row[0] for row in table} == set(races[0])
    for method, *cells in table:
        for race, step, seconds in zip(races, cells[::2], cells[1::2], strict=True):
            assert step == race[method]["step ms"]
            assert is_rounded(seconds, race[method]["seconds"])


@pytest.mark.parametrize(
    ("heading", "problems"),
    [
        ("Four hosts", [p.replace("two", "four") for p in (LANGUAGE_MODEL, CLASSIFIER)]),
        ("The larger language model", [LARGER_MODEL]),
    ],
)
def test_steps_in_the_report_of_the_race_are_those_of_its_runs(heading, problems):
    tables = find_race_tables(heading)
    assert len(tables) == len(problems)
    for table, problem in zip(tables, problems, strict=True):
        races = [find_race(problem, link) for link in ("100 Mbit/s", "1 Gbit/s")]
        assert {row[0] for row in table} == set(races[0])
        for method, _, *cells in table:
            for race, step, seconds in zip(races, cells[::2], cells[1::2], strict=True):
                predicted = race[method]["predicted ms"]
                assert step.replace("*", "") == race[method]["step ms"] + f" ({predicted})" * bool(predicted)
                # Some have steps alone.
                assert seconds == race[method]["seconds"] == "" or is_rounded(seconds, race[method]["seconds"])


def test_tables_of_the_race_are_made_from_its_records(monkeypatch):
    folder = REPOSITORY / "benchmarks" / "race"
    # Its own folder comes first, as when it is a script; what it imports from there has names that others have too.
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in ("chart", "report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    tables = runpy.run_path(str(folder / "tables.py"))
    for name in ("chart", "report"):
        monkeypatch.delitem(sys.modules, name)
    setting = tables["Setting"](hosts=2, rate_mbit=100.0, delay_ms=0.0)
    made = tables["table"](tables["rows_of"](RACE, "lm", setting, target=2.6), 2.6)
    assert find_rows(made) <= find_rows((RACE / "race.md").read_text())
    assert len(find_rows(made)) > 10


def test_memory_per_chip_of_the_readme_is_that_of_the_report():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    runs = json.loads((REPORTS / "2026-11-zero" / "memory_mixed.json").read_text())["runs"]
    ours = {run["stage"]: run for run in runs}
    for quoted, stage in {
        "replicated": "0",
        "ZeRO stage 1": "1 unrolled",
        "ZeRO stage 2": "2 unrolled",
        "ZeRO stage 3": "3",
        "stage 3 with bfloat16 moments": "3 in bfloat16",
        "with 8-bit moments": "3 in 8 bits",
        "with state on the host": "3 on the host",
    }.items():
        run = ours[stage]
        assert f"{quoted} {run['peak'] / run['parameters']:.1f}" in readme
    host = ours["3 on the host"]
    assert f"and {(host['host_arguments'] + host['host_temporary']) / host['parameters']:.1f} on the host]" in readme


def test_ratios_of_memory_bytes_and_time_beside_fsdp_are_those_of_the_report():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    rows = json.loads((REPORTS / "2026-11-peers" / "sharding.json").read_text())["rows"]
    ours, fsdp = (
        {name: statistics.median(row[name]) for name in ("peak", "sent_bytes", "seconds")}
        for row in (
            next(row for row in rows if row["mode"] == mode and row["system"] == system)
            for system, mode in (("jaxdist", "zero_3"), ("torch", "fsdp_3"))
        )
    )
    memory, sent, time = (ours[name] / fsdp[name] for name in ("peak", "sent_bytes", "seconds"))
    quoted = f"of the memory of PyTorch's FSDP2 and sent {sent:.2f} of its bytes in {time:.2f} of its time"
    assert f"needed {memory:.2f} {quoted}" in readme


def test_rows_of_the_page_of_measurements_are_rows_of_the_report():
    guide = (REPOSITORY / "docs/explanation/measurements.md").read_text()
    # Rows of the suite begin with their rank.
    quoted = {row for row in find_rows(guide) if re.match(r"\| \d+ \| `", row)}
    assert len(quoted) > 10
    assert quoted <= find_rows((REPORTS / "2026-11-compression" / "suite.md").read_text())


def test_starts_of_the_page_are_those_of_the_report():
    guide = (REPOSITORY / "docs/explanation/measurements.md").read_text()
    quoted = re.findall(r"^\| (\d+) \| [\d.]+ % \| [\d.]+x \| (.+%, .+%) \| (.+%, .+%) \|$", guide, re.M)
    assert len(quoted) == 6
    report = (REPORTS / "2026-11-local" / "warm_start.md").read_text()
    half, nine = (
        dict(re.findall(r"^\| (\d+) \| .* \| (.+%) \|$", report.split(f"diloco:32,0.7,{momentum}`")[1], re.M)[:6])
        for momentum in (0.5, 0.9)
    )
    assert [(nine[steps], half[steps]) for steps, *_ in quoted] == [(first, second) for _, first, second in quoted]


def test_starts_of_a_larger_model_in_the_guide_are_those_of_the_report():
    guide = (REPOSITORY / "docs/explanation/measurements.md").read_text().split("360 times larger")[1]
    report = (REPORTS / "2026-11-local" / "larger" / "warm_start.md").read_text()
    _, *parts = re.split(r"^`(.+)`$", report, flags=re.M)
    above, fewer = {}, {}
    for method, table in zip(parts[::2], parts[1::2], strict=True):
        for warm, bytes_of_all, percent in re.findall(r"^\| (\d+) \| ([\d.]+)x \| .* \| (.+ %) \|$", table, re.M):
            above[method, warm], fewer[warm] = percent, f"{float(bytes_of_all):g}x"
    for warm, share in (("0", 0), ("256", 10), ("512", 20), ("1024", 40)):
        (row,) = re.findall(rf"^\| {warm} \| {share} % .*$", guide, re.M)
        methods = ("diloco:32,0.7,0.9", "diloco:32,0.7,0.5", "local_sgd:32")
        percents = [above.get((method, warm), "") for method in methods]
        assert [cell.strip() for cell in row.split("|")[3:-1]] == [fewer[warm], *percents]


def read_best_rates(workers: int) -> dict[tuple[str, int], str]:
    """The percentages above synchronous training by method and start, each at its best rate, of all seeds."""
    report = (REPORTS / "2026-11-local" / f"best_rates_{workers}.md").read_text()
    rows = re.findall(r"^\| `(.+)` \| (\d+) \| .* \| (.+ %) \|$", report, re.M)
    return {(method, int(warm)): percent for method, warm, percent in rows}


def test_best_rates_of_the_page_are_those_of_the_report():
    guide = (REPOSITORY / "docs/explanation/measurements.md").read_text()
    four, eight = read_best_rates(4), read_best_rates(8)
    diloco, local = "diloco:32,0.7,0.9", "local_sgd:32"
    for row in (
        f"`H = 32` | 4 | {four[diloco, 256]} | {four[diloco, 512]} |",
        f"| Local SGD, `H = 32` | 4 | {four[local, 256]} | {four[local, 512]} |",
        f"| DiLoCo, `H = 128` (4.8x) | 4 | | {four['diloco:128,0.7,0.9', 512]} |",
        f"outer rate 0.4 | 4 | | {four['streaming:32,0.4,0.9', 512]} |",
        f"| DiLoCo, `H = 32` | 8 | | {eight[diloco, 512]} |",
        f"| Local SGD, `H = 32` | 8 | | {eight[local, 512]} |",
    ):
        assert row in guide


def test_the_local_suite_of_the_page_is_that_of_the_report():
    guide = (REPOSITORY / "docs/explanation/measurements.md").read_text()
    report = (REPORTS / "2026-11-local" / "suite.md").read_text()
    percents = {}
    for workers, table in re.findall(r"^(\d) workers\n\n(.*?)(?:\n\n|\Z)", report, re.M | re.S):
        for spelling, percent in re.findall(r"^\| `(.+?)` \| .* \| (.+? %) \|$", table, re.M):
            percents[int(workers), spelling] = percent
    assert len(percents) == 2 * 19
    for name, spelling in (
        ("Local SGD", "local_sgd:H={}"),
        ("SlowMo, 0.5", "slowmo:H={},momentum=0.5,buffers=maintain"),
        ("DiLoCo", "diloco:H={},momentum=0.9"),
        ("streaming DiLoCo, 4 fragments", "streaming_diloco:H={},fragments=4,momentum=0.9"),
        ("DiLoCo, outer difference in 4 bits", "diloco:H={},momentum=0.9/two_shot:qsgd:4"),
        ("SparseLoCo", "sparse_loco:H={}"),
    ):
        cells = [percents[workers, spelling.format(period)] for period in (8, 32, 128) for workers in (4, 8)]
        (row,) = re.findall(rf"^\| {re.escape(name)} \| [^|]*`H`[^|]* \| (.*) \|$", guide, re.M)
        assert row.split(" | ") == cells


def test_best_rates_are_those_of_the_runs():
    lines = (REPORTS / "2026-11-local" / "warm_start.jsonl").read_text().splitlines()
    losses = {}
    for row in map(json.loads, lines):
        if row["workers"] == 4 and row["seed"] == 0:
            losses.setdefault((row["method"], row["warmup_steps"]), []).append(row["held_out_loss"])
    base = min(losses["synchronous", 0])
    assert len(losses["synchronous", 0]) == 4
    for run, percent in read_best_rates(4).items():
        assert f"{100 * (min(losses[run]) / base - 1):+.1f} %" == percent.partition(", ")[0]


def test_demo_of_the_readme_is_that_of_the_report():
    readme = (REPOSITORY / "README.md").read_text()
    quoted = re.findall(r"^\| `([\w:/.-]+)`.* \| [\d.]+ \w+ \| [\d.]+x \| (.+) \| (.*)\|$", readme, re.M)
    lines = (REPORTS / "2026-11-compression" / "demo_seeds.jsonl").read_text().splitlines()
    losses: dict[str, list[float]] = {}
    for line in map(json.loads, lines):
        if line["kind"] == "summary":
            losses.setdefault(line["name"], []).append(line["held_out_loss"])
    assert [len(each) for each in losses.values()] == 6 * [3]

    def spell(values: list[float], sign: str = "") -> str:
        return f"{statistics.mean(values):{sign}.3f} ±{statistics.stdev(values):.3f}"

    found = []
    for name, each in losses.items():
        differences = [loss - exact for loss, exact in zip(each, losses["exact"], strict=True)]
        found.append((name, spell(each), "" if name == "exact" else f"{spell(differences, '+')} "))
    assert quoted == found


def test_kept_memory_of_the_faq_is_that_of_the_report():
    folder = REPORTS / "2026-11-foundation"
    found = []
    for name in ("loopback_default_malloc", "loopback_quiet"):
        classifier = (folder / name / "links.md").read_text().split("Classifier, 10.5 M")[1]
        found.append(re.search(r"^\| jaxdist `exact\(\)` \| (\d+) \| [\d-]+ \| (\d+) \|", classifier, re.M).groups())
    (step, added), (kept_step, kept_added) = found
    faq = " ".join((REPOSITORY / "docs/faq.md").read_text().split())
    assert f"from {step} to {kept_step} ms, and the added time of an all-reduce from {added} to {kept_added} ms" in faq


def test_uneven_workers_of_the_guide_are_those_of_the_report():
    guide = (REPOSITORY / "docs/how-to/when-workers-are-uneven.md").read_text()
    report = (REPORTS / "2026-11-uneven" / "README.md").read_text()
    for title, row, after in (
        ("synchronous SGD", "synchronous SGD", " after 2048 s"),
        ("H = 32 and 1", "H = 32 and 1, all uniform", ""),
        (
            "the same, slow workers draw from the hardest fifth",
            "H = 32 and 1, slow ones draw from the hardest fifth",
            "",
        ),
    ):
        first, *_ = re.findall(rf"^\| {row} \| \d+ \| ([\d.]+) .* \| (\d+)[^|]* \|$", report, re.M)
        assert f"| {title} | {first[1]} | {first[0]}{after} |" in guide


def test_exposed_buckets_of_the_guide_are_those_of_the_report():
    guide = " ".join((REPOSITORY / "docs/how-to/hide-the-communication.md").read_text().split())
    report = (REPORTS / "2026-11-overlap" / "late.md").read_text()
    rows = re.findall(
        r"^\| h100:4x8 \| buckets of 16 MiB, `delay=(\d)` \| (\w+) \| .* \| (\S+) \| \S+ \|$", report, re.M
    )
    exposed = {(delay, loss): time for delay, loss, time in rows}
    apart, with_loss = ([exposed[delay, loss] for delay in "01"] for loss in ("no", "yes"))
    quoted = "In buckets of 16 MiB it was {} and {} ms, and {} and {} ms with the mean of the loss in the step"
    assert quoted.format(*apart, *with_loss) in guide


def test_kills_of_the_guide_to_islands_are_those_of_the_report():
    guide = " ".join((REPOSITORY / "docs/how-to/train-on-spot-machines.md").read_text().split())
    report = (REPORTS / "2026-11-islands" / "README.md").read_text()
    kills, stops = re.search(r"\| (\d+) kills and (\d+) stops:", report).groups()
    assert f"In {kills} kills and {stops} long stops" in guide


def test_errors_of_plans_in_the_guide_are_those_of_the_report():
    guide = " ".join((REPOSITORY / "docs" / "how-to" / "before-you-rent-a-pod.md").read_text().split())
    rows = json.loads((REPORTS / "2026-11-accelerators" / "gpu.json").read_text())
    small, large = (next(row for row in rows if row["name"] == name) for name in ("gpt:125m", "gpt:1b"))
    short = [1 - row["predicted_seconds"] / row["seconds"] for row in (small, large)]
    assert (
        f"the step of `gpt:125m` was predicted {short[0]:.0%} too short, that of `gpt:1b` {short[1]:.0%}".replace(
            "%", " %"
        )
        in guide
    )
    assert all(abs(row["predicted_peak"] / row["peak"] - 1) < 0.005 for row in (small, large))


def read_accelerator(run: str = ".") -> dict[str, dict]:
    """The rows of a run on the GPU, by name; codes of PyTorch have the names of ours."""
    rows = json.loads((REPORTS / "2026-11-accelerators" / run / "gpu.json").read_text())
    return {row["name"]: row for row in rows if row["section"] != "torch"}


def test_what_an_h100_reaches_in_plans_is_in_the_report():
    report = (REPORTS / "2026-11-accelerators" / "README.md").read_text()
    runs, chip = [read_accelerator("second"), read_accelerator()], CHIPS["h100"]
    copies = [run["-x in place"]["bytes"] / run["-x in place"]["seconds"] for run in runs]
    assert statistics.mean(copies) / chip.bandwidth == pytest.approx(chip.bandwidth_reached, abs=0.01)
    assert " and ".join(f"{copy / 1e9:,.0f}" for copy in copies) + f" of {chip.bandwidth / 1e9:,.0f} GB/s" in report
    for dtype, peak in (("float32", chip.flops["other"]), ("bfloat16", chip.flops["bfloat16"])):
        product = runs[-1][f"product of 4096 x 4096, {dtype}"]
        reached = product["flops"] / product["seconds"]
        assert reached / peak == pytest.approx(chip.flops_reached, abs=0.01)
        assert f"{reached / 1e12:.0f} of {peak / 1e12:.0f} " in report
    launches = [1e6 * run["a small kernel of a program"]["seconds"] for run in runs]
    assert max(launches) == pytest.approx(1e6 * chip.launch, rel=0.1)
    assert "took {:.0f} us in one run and {:.0f} in another".format(*launches) in report


def test_times_on_an_h100_in_the_report_are_those_of_its_runs():
    report = (REPORTS / "2026-11-accelerators" / "README.md").read_text()
    first, second, last = (read_accelerator(run) for run in ("first", "second", "."))
    for title, name, before in (
        ("AdamW of 67 M parameters, state streamed from the host", 'adamw, compute="device"', first),
        ("PowerSGD with feedback, rank 32, 1024 x 1024", "1024x1024, rank 32", first),
        ("the same, 4096 x 1024", "4096x1024, rank 32", first),
        ("AdamW with moments in 8 bits, 67 M parameters", "quantized_state(adamw), 8 bits", first),
        *((f"`{code}`", code, second) for code in ("scaled_sign(bucket=1024)", "int8()", "int4()", "fp8()")),
        *((f"`{code}`", code, second) for code in ("qsgd(4)", "dynamic_fp8()")),
        ("`block_top_k(64 / 4096)`", "block_top_k(64 / 4096)", second),
    ):
        (quoted,) = re.findall(rf"^\| {re.escape(title)}(?:, 134 M entries)? \| (\S+) \| (\S+) \|", report, re.M)
        times = (1e3 * run[name]["seconds"] for run in (before, last))
        assert quoted == tuple(spell_like(text, time) for text, time in zip(quoted, times, strict=True))
    update = {where: 1e3 * last[f'adamw, compute="{where}"']["seconds"] for where in ("host", "device")}
    page = " ".join((REPOSITORY / "docs" / "reference" / "offload.md").read_text().split())
    assert f"took {update['host']:.0f} ms on the host and {update['device']:.0f} ms on the device" in page


def test_times_by_warps_in_the_report_are_those_of_its_run():
    report = " ".join((REPORTS / "2026-11-accelerators" / "README.md").read_text().split())
    found = read_accelerator("warps")
    copy = found["-x in place"]
    for code, quoted in (
        ("qsgd(4)", "took {:.3f} ms and takes {:.3f}, {:.0f} %"),
        ("dynamic_fp8()", "{:.3f} and {:.3f}, {:.0f} %"),
        ("int8()", "which draws nothing, {:.3f} and {:.3f}."),
    ):
        before, now = (found[f"{code}, tiles of {TILE}, {n} warps"] for n in (4, WARPS))
        share = 100 * now["bytes"] / now["seconds"] * copy["seconds"] / copy["bytes"]
        assert quoted.format(1e3 * before["seconds"], 1e3 * now["seconds"], share) in report


def spell_like(text: str, number: float) -> str:
    """A number with as many decimals as another one has."""
    return f"{number:.{len(text.partition('.')[2])}f}"


def test_each_mode_of_the_links_has_a_label():
    """The report is written after all modes have been measured."""
    step, report = ((REPOSITORY / "benchmarks/links" / name).read_text() for name in ("jaxdist_step.py", "report.py"))
    modes = re.findall(r'^    "(\w+)": lambda', step, re.MULTILINE)
    assert len(modes) > 10
    assert set(modes) <= set(re.findall(r'^    \("jaxdist", "(\w+)"\):', report, re.MULTILINE))
