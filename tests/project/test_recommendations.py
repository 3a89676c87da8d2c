"""What pages and examples recommend with a memory of errors is no worse than the same reducer without one."""

import argparse
import ast
import itertools
import json
import platform
import re
import runpy
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import REPOSITORY

import jaxdist as jd
from jaxdist import compressors, reducers
from jaxdist._cli.spellings import parse

# What can be combined is a table of all reducers, not advice.
PAGES = sorted(
    {REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("examples/*.py")}
    - {REPOSITORY / "docs/reference/compositions.md"}
)
TABLE = REPOSITORY / "benchmarks/reports/2026-11-feedback/feedback.jsonl"
COMMANDS = REPOSITORY / "benchmarks/reports/2026-11-commands/commands.jsonl"
WHOLE = COMMANDS.with_name("whole.jsonl")
REPLAYS = COMMANDS.with_name("replays.jsonl")
MEMORIES = ("error_feedback", "loco", "ef21")
# Some names of the package are imported when they are asked for.
TOP = {name: getattr(jd, name) for name in dir(jd)}
NAMES = {**vars(compressors), **vars(reducers), **TOP, "jd": jd, "jax": jax, "jnp": jnp}
# In a command, or after the method whose rounds it is used in.
SPELLED = re.compile(r"(?<![\w:])(?:ef|loco|ef21):[\w:.,=+]*\w")
CALLED = re.compile(rf"(?<!\w)(?:jd\.)?(?:reducers\.)?(?:{'|'.join(MEMORIES)})\(")


class Line(NamedTuple):
    """A reducer with a memory, as a page writes it, the reducer inside, and where it is written."""

    text: str
    reducer: jd.reducers.Reducer
    plain: jd.reducers.Reducer
    page: str


def calls(text):
    """The expressions that call a memory, up to their closing bracket."""
    for match in CALLED.finditer(text):
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                yield text[match.start() : end + 1]
                break


def read_call(text):
    """The reducers of an expression; None where it needs more than the library, as `biased` or `ternary()` do."""
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
        plain = eval(compile(ast.Expression(tree.args[0]), "page", "eval"), dict(NAMES))
        return eval(compile(ast.Expression(tree), "page", "eval"), dict(NAMES)), plain
    except (NameError, SyntaxError, TypeError, ValueError, IndexError, AttributeError):
        return None


def read_spelling(text):
    try:
        return parse.parse_reducer(text), parse.parse_reducer(text.partition(":")[2])
    except ValueError:
        return None


@cache
def lines():
    found = {}
    for page in PAGES:
        text = page.read_text()
        both = [(each, read_call(each)) for each in calls(text)]
        both += [(each, read_spelling(each)) for each in SPELLED.findall(text)]
        for each, pair in both:
            if pair is not None and isinstance(pair[1], jd.reducers.Reducer):
                found.setdefault(pair[0].description or each, Line(each, *pair, page.name))
    return found


@cache
def measured():
    """The losses of the report, at the best rate of each row: `losses[place, code, form, optimizer]`."""
    losses = {}
    for line in TABLE.read_text().splitlines():
        row = json.loads(line)
        if row["workers"] == 4:
            finite = [np.array(x, float) for x in row["losses"] if None not in x]
            best = min(finite, key=np.mean) if finite else np.full(len(row["seeds"]), np.inf)
            losses[row["place"], row["code"], row["form"], row["optimizer"]] = best
    return losses


def is_worse(own, plain, tolerance):
    """Whether losses of the same seeds are higher by more than their spread and a tolerance."""
    ratios = np.asarray(own) / np.asarray(plain) - 1
    return not ratios.mean() <= max(np.ptp(ratios) / 2, tolerance)


def test_pages_recommend_memories_and_this_reads_them():
    found = {line.plain.description for line in lines().values()}
    assert {"compressed(qsgd(4))", "power_sgd(rank=4)", "compressed(top_k(0.01))"} <= found
    assert is_worse([1.03, 1.05, 1.04], [1, 1, 1], 0.01)
    assert not is_worse([1.03, 0.98, 1.0], [1, 1, 1], 0.01)
    assert is_worse([np.inf, np.nan, 1], [1, 1, 1], 0.01)


def test_a_memory_around_an_unbiased_code_is_in_the_report():
    """In every step and in rounds: a page that names such a reducer may be read for either."""
    seen = 0
    for line in lines().values():
        # Error feedback wraps another form of what is unbiased.
        if line.plain.forms.contraction is None or "top_k" in line.plain.description:
            continue
        name, bits = re.search(r"(qsgd|nuqsgd|alq)\((?:bits=)?(\d)", line.plain.description).groups()
        memory = line.reducer.description.partition("(")[0].replace("error_feedback", "ef")
        form = f"{memory} two_shot" if line.plain.description.startswith("two_shot") else memory
        plain = "two_shot" if form.endswith("two_shot") else "plain"
        for place in ("steps", "diloco"):
            for optimizer in ("adamw", "momentum"):
                own, other = (measured()[place, f"{name}, {bits} bits", x, optimizer] for x in (form, plain))
                assert not is_worse(own, other, 0.002), (line.text, line.page, place, optimizer)
        seen += 1
    assert seen


def test_the_report_has_the_table_of_its_rows_and_its_script_makes_each_of_them(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    script = runpy.run_path(str(REPOSITORY / "benchmarks/quality/feedback.py"))
    rows = script["read_rows"](TABLE)
    table = script["make_table"](rows)
    assert TABLE.with_suffix(".md").read_text() == table + "\n"
    assert "| 4 | qsgd, 4 bits | the code alone | +0.0" in table
    forms = {(row["code"], row["form"]) for row in rows if row["place"] != "gossip"}
    assert all(isinstance(script["make_reducer"](*pair), jd.reducers.Reducer) for pair in forms)
    asked = argparse.Namespace(places=["diloco", "gossip"], workers=[4])
    chosen = [*script["runs"](asked)]
    assert len(chosen) == len(set(chosen)) > 50


# --- commands in shell blocks ---


@pytest.fixture
def commands(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return argparse.Namespace(**runpy.run_path(str(REPOSITORY / "benchmarks/quality/commands.py")))


def test_commands_of_pages_are_read_as_compare_spells_them(commands):
    def read(command):
        return commands.read_command(f"jaxdist {command}")

    text, digits = commands.Setting("text", "adamw:1e-3", 500), commands.Setting("digits", "adamw:2e-3", 200)
    found = read("train --sync diloco:H=50 --reducer ef:qsgd:4 --steps 500")
    assert found == (text, ("diloco:H=50/ef:qsgd:4",))
    found = read("compare --reducers exact ef:sign --workload digits --seeds 3")
    assert found == (digits, ("exact", "ef:sign"))
    assert read("train --steps 1000 --save-every 50")[0] == text._replace(steps=200)
    assert read("train --steps 2000 --text my-notes/")[0] == text._replace(steps=1000, text="my-notes/")
    assert read("train --zero 3 --reducer two_shot:int8")[1] == ("zero:3/two_shot:int8",)
    found = read("compare --suite local --workers 4 8")[1]
    assert found == ("exact", "diloco:H=32,momentum=0.9,warmup_steps=102/two_shot:qsgd:4")
    assert read("compare --model my_model:make --reducers ef:sign")[0].model == "my_model:make"
    others = ("train --zero 3 --offload host", "train --islands x", "train --engine ray --rule bsp")
    assert not any(map(read, (*others, "compare --suite compression", "compare --suite local --start 0")))
    named = ["exact", "ef:sign", "diloco:H=9/ef:qsgd:4", "diloco:H=9/qsgd:4", "compressed_adam:2e-3/ef:sign"]
    named += ["zero:1", "zero:3/two_shot:int8", "my_reducers:diana:qsgd:2,rate=0.1"]
    plain = [None, "sign", "diloco:H=9/qsgd:4", "diloco:H=9", "compressed_adam:2e-3/sign"]
    plain += ["exact", "two_shot:int8", "qsgd:2"]
    assert [commands.plain_form(method) for method in named] == plain


def test_commands_that_compare_does_not_have_are_run_whole(commands):
    own, plain, exact = commands.spell_forms("jaxdist train --zero 3 --offload nvme:/scratch/run --steps 1000")
    small = "train --zero 3 --offload nvme:disk --model gpt:tiny --steps 200 --no-baseline"
    assert own == (small,)
    assert plain == (small.replace(" --offload nvme:disk", ""),)
    assert exact == ("train --model gpt:tiny --steps 200 --no-baseline --reducer exact",)
    islands = "train --sync diloco:H=50 --model gpt:tiny --steps 200 --islands store --begin-with 2 --name "
    own, plain, exact = commands.spell_forms("jaxdist train --sync diloco:H=50 --islands s3://a/b --name eu-1")
    assert own == (f"{islands}a", f"{islands}b")
    together = "--model gpt:tiny --steps 200 --no-baseline --devices 2 --batch 64"
    assert (plain, exact) == ((f"train --sync diloco:H=50 {together}",), (f"train {together} --reducer exact",))
    coded = commands.spell_forms("jaxdist train --sync diloco:H=50 --reducer ef:qsgd:4 --islands s3://a/b")
    assert coded[1] == own


def test_every_command_that_trains_is_measured(commands):
    """Other than those that the script leaves out."""
    whole = {each.command for each in commands.whole_commands()}
    known = [command for command, _ in commands.commands() if not any(x in command for x in commands.LEFT_OUT)]
    assert all(commands.read_command(command) or command in whole for command in known)
    assert len(whole) > 4


def test_commands_of_pages_are_no_worse_than_their_plain_form(commands):
    """The held-out losses of the report, which has each of them; a memory that loses would be bad advice."""
    rows, named = commands.read_rows(COMMANDS), commands.methods_of_pages()
    assert sum(len(methods) for methods in named.values()) > 50
    for setting, methods in named.items():
        for method in methods:
            losses = rows[setting][method]
            assert len(losses) == 3
            plain = commands.plain_form(method)
            if plain:
                assert not is_worse(losses, rows[setting][plain], 0.005), (setting, method)
    assert COMMANDS.with_suffix(".md").read_text() == commands.make_table(rows) + "\n"


def test_whole_commands_of_pages_are_no_worse_than_their_plain_form(commands):
    rows = commands.read_whole(WHOLE)
    for each in commands.whole_commands():
        own, plain, exact = (rows[form] for form in (each.own, each.plain, each.exact))
        assert len(own) == len(plain) == len(exact) == 3
        assert not is_worse(own, plain, 0.005), each.command
    assert WHOLE.with_suffix(".md").read_text() == commands.make_whole_table(rows) + "\n"


def test_replays_of_pages_are_no_worse_than_without_a_memory(commands):
    rows, pairs = commands.read_replays(REPLAYS), 0
    for each in commands.replay_commands():
        own = rows[each.own]
        assert "bsp" in own
        for rule, (loss, deviation) in rows[each.plain].items() if each.plain else ():
            allowed = max(deviation, own[rule][1], 0.005 * loss)
            assert own[rule][0] <= loss + allowed, (each.command, rule)
            pairs += 1
    assert pairs > 3
    assert REPLAYS.with_suffix(".md").read_text() == commands.make_replay_table(rows) + "\n"


@pytest.mark.slow
def test_whole_commands_train_as_the_report_says(commands):
    """With the first seed. The text is Python's own library: of another version than the report's it is another one."""
    reports = json.loads(WHOLE.with_name("environment.json").read_text())["python"]
    off = 0.02 if platform.python_version_tuple()[:2] == tuple(reports.split(".")[:2]) else 0.04
    rows = commands.read_whole(WHOLE)
    forms = {form for each in commands.whole_commands() for form in (each.own, each.plain)}
    assert len(forms) > 5
    for form in sorted(forms):
        assert commands.measure_whole(form, 1)["losses"][0] == pytest.approx(rows[form][0], rel=off), form


# --- a small run of each line ---

WORKERS, STEPS, PERIOD, START = 4, 160, 8, 32
SIZES = (32, 64, 64, 16)


def init_network(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    pairs = zip(keys, itertools.pairwise(SIZES), strict=True)
    return [jax.random.normal(key, pair) / pair[0] ** 0.5 for key, pair in pairs]


def predict(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


TEACHER = [1.5 * w for w in init_network(jax.random.key(99))]


def loss_fn(weights, key, size=32):
    x = jax.random.normal(key, (size, SIZES[0]))
    return jnp.mean(jnp.square(predict(weights, x) - predict(TEACHER, x)))


@cache
def held_out_losses(place, reducer):
    """Of three seeds, in one program."""
    in_rounds = place == "rounds"
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3 if in_rounds else 0.1, 16, STEPS)
    rule = optax.adamw(rate) if in_rounds else optax.sgd(rate, momentum=0.9)
    inner = optax.chain(optax.clip_by_global_norm(1.0), rule)
    tx = optax.chain(jd.all_reduce(reducer), inner)
    if in_rounds:
        tx = jd.local_sgd.diloco(inner, sync_period=PERIOD, warmup_steps=START, reducer=reducer)

    def step(state, number):
        key = jax.random.fold_in(jax.random.fold_in(state["data"], number[0]), jax.lax.axis_index("data"))
        _, gradients = jd.local_value_and_grad(loss_fn)(state["params"], key)
        updates, opt_state = tx.update(gradients, state["opt"], state["params"])
        return state | {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, ()

    simulated = jd.simulate(step, WORKERS)

    def make_state(key):
        params = init_network(key)
        marked = jd.PerWorker(params) if in_rounds else params
        return jd.init_state(lambda: {"params": marked, "opt": tx.init(params), "data": key}, WORKERS)

    @jax.jit
    def train(state):
        numbers = jnp.broadcast_to(jnp.arange(STEPS)[:, None], (STEPS, WORKERS))
        state, _ = jax.lax.scan(lambda state, number: (simulated(state, number)[0], None), state, numbers)
        weights = jd.local_sgd.global_params(state["opt"]) if in_rounds else state["params"]
        return loss_fn(weights, jax.random.key(5), 2048)

    return [float(train(make_state(jax.random.key(seed)))) for seed in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["steps", "rounds"])
@pytest.mark.parametrize("name", lines())
def test_what_pages_recommend_is_no_worse_than_its_plain_form(name, place):
    line = lines()[name]
    unbiased = line.plain.forms.contraction is not None
    if place == "rounds" and not unbiased:
        pytest.skip("biased codes are recommended for every step, and need their memory there")
    own, plain, exact = (held_out_losses(place, each) for each in (line.reducer, line.plain, jd.exact()))
    assert not is_worse(own, plain, 0.02), (own, plain, exact)
    if unbiased:
        assert not is_worse(own, exact, 0.05), (own, exact)
