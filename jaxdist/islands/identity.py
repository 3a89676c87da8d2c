"""Which run a store holds: its number, and the model and method of all of its islands, by what these compute.

`run.json` has the number of the run, and `methods/NUMBER.json` describes the rest. Shapes cannot tell two quantizers of
equal bytes apart, nor momentum from Nesterov momentum. So it also has the programs of a round as text, with every
number in them, and the bits that they give on inputs that all islands make alike. Both are of decoding and of the outer
step: what the steps of an island do between rounds is its own affair.
"""

import enum
import itertools
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.compat import Literal
from .._core.jaxprs import inner_jaxprs
from .._core.trees import is_key, named_leaves
from .._core.types import PyTree
from .._stores.base import SharedStore, hash_of
from ..local_sgd.state import LocalStepsState
from ..state.marks import bind, read_order, show_orders
from ..state.placement import place_leaf
from ..wire.buffers import leaf_order
from . import protocol
from .base import DamagedError, JoinOptions, RunMismatchError, RunMissingError
from .connection import Connection
from .exchange import (
    MessagePlan,
    RoundMethod,
    Shared,
    add_member,
    common_leaves,
    encode_drift,
    find_whole,
    hash_leaves,
    split_total,
    step_from_total,
    take_outer_step,
    to_host,
)
from .fragments import FragmentModel

logger = logging.getLogger("jaxdist.islands")
RUN_JSON = "run.json"
# Entries of a leaf that differ from 0 in what the programs are run on, of at most 2 in steps of 1/8: sums of their
# squares are exact in float32, so that islands on meshes of different sizes get the same bits.
PATTERN_ENTRIES = 2**16
OUTER_STEPS = 3
# Differences that a message names.
MOST_NUMBERS = 8
# What two descriptions are compared by, in this order, and what one without a line means by that.
KEYS = (
    "sync_period",
    "merge",
    "parameters",
    "order",
    "dtypes",
    "order of fragments",
    "fragments",
    "reducer",
    "payload",
    "code",
    "outer optimizer",
)
DEFAULTS = {"merge": "mean", "order of fragments": None, "fragments": None}
RESTORE = "restore them from a copy, or begin a new run in an empty folder, from a checkpoint"
NEW_RUN = "use the model and the method of the run, or begin a new run in an empty folder"


class RunIdentity(NamedTuple):
    """Which run an island belongs to.

    Attributes:
      id: 32 hexadecimal digits, drawn by the island that opened the run.
      keep_every: rounds between kept global parameters, the same for all islands.
      opened: whether this process has opened it.
      place: where it is, for messages.
      owners: into how many pieces bodies are cut, whose means islands compute for each other; 0: none.
    """

    id: str
    keep_every: int
    opened: bool
    place: str
    owners: int = 0

    @property
    def mark(self) -> str:
        """What records of the run have of its number."""
        return self.id[:8]


NO_RUN = RunIdentity("", 0, False, "")


# The description of a run


def describe(
    method: RoundMethod,
    local: LocalStepsState,
    params: PyTree | None,
    parts: Sequence[FragmentModel],
    plans: Sequence[MessagePlan],
    *,
    sync_period: int,
    needs_rate: bool,
    fragments: dict[str, Any],
) -> dict[str, Any]:
    """What all islands of a run must have in common, as JSON can hold it.

    Without fragments, what describes the only part is among the rest; with `fragments` each part has its own.
    """
    device = jax.devices()[0]
    dtypes = {} if params is None else {"dtypes": _shapes(params)}
    described = [
        _describe_part(method, part, plan, needs_rate=needs_rate) for part, plan in zip(parts, plans, strict=True)
    ]
    return dtypes | {
        "format": protocol.FORMAT,
        "sync_period": sync_period,
        "merge": method.merge,
        "parameters": _shapes(local.anchor),
        # JSON sorts the names, and bodies have the leaves one after another.
        "order": [[name, list(shape)] for name, shape in leaf_order(local.anchor)],
        "code": None if method.reducer.forms.codec is None else method.reducer.forms.codec.name,
        "call": str(method.reducer),
        "versions": {"jax": jax.__version__, "device": device.device_kind},
        **(fragments | {"parts": described} if fragments else described[0]),
    }


def _describe_part(method: RoundMethod, part: FragmentModel, plan: MessagePlan, *, needs_rate: bool) -> dict[str, Any]:
    """What the rounds of a fragment send and compute."""
    return {
        "reducer": _shapes(jax.eval_shape(method.reducer.init, part.local.anchor)),
        "payload": [f"{x.dtype}{list(x.shape)}" for message in plan.messages for x in message],
        "outer optimizer": _shapes(part.local.outer[0]),
        "programs": _fingerprint(method, part.local, plan, needs_rate=needs_rate),
    }


def _shapes(tree: Any) -> dict[str, str]:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(tree)}


def _fingerprint(
    method: RoundMethod, local: LocalStepsState, plan: MessagePlan, *, needs_rate: bool
) -> dict[str, dict[str, Any]]:
    """Text, numbers and results of the programs that all islands run alike; compiles none that meetings do not need."""
    # Parameters as wide as the anchor: another island, and a reader, may have others.
    anchor, params = _pattern(local.anchor, 1), _pattern(local.anchor, 2)
    reducer = _place_fresh(method.reducer.init(anchor), local.reducer[0])
    shared = Shared(anchor, _place_fresh(method.outer.init(anchor), local.outer[0]), common_leaves(reducer))
    one, start = np.float32(1), shared
    encodings, received = [], []
    for number, like in enumerate(plan.messages):
        encodings.append((method, np.int32(0), anchor, params, reducer, one, received))
        # What is averaged may be any numbers. Those of the encoder may be sums over entries, as products of PowerSGD
        # are, and the mesh of an island decides in which order these are added.
        if plan.is_averaged(number):
            sent = [_draw_pattern(x, i, salt=3) for i, x in enumerate(like)]
        else:
            sent = [to_host(x) for x in encode_drift(*encodings[-1])[0]]
        received = [*received, sent]
    *received, hosts = received
    total, replicated = method.begin_total(anchor), shared.reducer
    adding = (method, total, hosts, one, reducer, received)
    for _ in range(2):  # the second member is added to what the first left
        total, replicated = add_member(*adding)
        adding = (method, total, hosts, one, reducer, received)
    decoded = Shared(total, shared.outer, replicated)
    stepping = (method, shared, *split_total(total), one, replicated, one, find_whole(anchor))
    # The outer step takes the rate of the inner ones, or none.
    rates = [one if needs_rate else None, *[one] * (OUTER_STEPS - 1)]
    for rate in rates:
        # A step uses up its total.
        shared = take_outer_step(method, shared, jax.tree.map(jnp.copy, total), one, replicated, rate)
    begins, added, stepped = (_hash_parts(found) for found in (start, decoded, shared))
    parts = {
        # Not the outer state, which decoding leaves alone.
        "reducer": (
            2,
            [*(encode_drift.trace(*each) for each in encodings), add_member.trace(*adding)],
            [added[0], added[2]],
        ),
        "outer optimizer": (1, [step_from_total.trace(*stepping)], stepped),
    }
    return {
        part: _spell(traced) | {"start": _name_start(start[number], begins[number]), "result": _hash_all(found)}
        for part, (number, traced, found) in parts.items()
    }


def _hash_parts(shared: Shared) -> list[list[str]]:
    """Hashes of the leaves of each part of a shared state, by the program that names its bits in meetings."""
    hashes = iter(hash_leaves(shared))
    return [[hash_of(next(hashes).tobytes()) for _ in jax.tree.leaves(part)] for part in shared]


def _hash_all(hashes: list[list[str]]) -> str:
    return hash_of("".join(itertools.chain(*hashes)).encode())


def _name_start(state: PyTree, hashes: list[str]) -> dict[str, str]:
    """What a state begins with, by the names of its leaves: numbers as they are, arrays and keys by their hashes."""
    return {
        name: hashed if x.ndim or is_key(x) else str(to_host(x))
        for (name, x), hashed in zip(named_leaves(state), hashes, strict=True)
    }


def _pattern(like: PyTree, salt: int) -> PyTree:
    """Arrays of `_draw_pattern`, placed like those of a tree."""

    def make_leaf(number: int, x: Any) -> Any:
        values = _draw_pattern(x, number, salt)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: values[index])

    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([make_leaf(number, x) for number, x in enumerate(leaves)])


def _draw_pattern(like: Any, number: int, salt: int) -> np.ndarray:
    """An array whose first entries are ±1, ±1/2, ±1/4 and ±1/8 in an irregular order, and whose others are 0."""
    size = min(like.size, PATTERN_ENTRIES)
    draws = np.random.Generator(np.random.PCG64([salt, number])).integers(0, 8, size)
    values = np.zeros(like.size, like.dtype)
    values[:size] = (np.where(draws < 4, 1, -1) * 0.5 ** (draws % 4)).astype(like.dtype)
    return values.reshape(like.shape)


def _place_fresh(fresh: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: place_leaf(x, y.sharding), bind(fresh, None), like)


def _spell(traced: list[Any]) -> dict[str, Any]:
    """The hash of the text of programs, and the numbers in them."""
    numbers: set[str] = set()
    text = "\n".join(line for program in traced for line in _lines(program.jaxpr, numbers))
    return {"program": hash_of(text.encode()), "numbers": sorted(numbers)}


def _lines(closed: Any, numbers: set[str]) -> Iterator[str]:
    """A program as text: primitives, operands, numbers and constants; no shardings and no names, which may differ."""
    fresh = map("x{}".format, itertools.count())
    names = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], fresh))

    def spell_operand(atom: Any) -> str:
        if not isinstance(atom, Literal):
            return names[atom]
        numbers.add(str(atom.val))
        return f"{atom.aval}({atom.val})"

    yield from (f"constant {_hash_constant(value)}" for value in closed.consts)
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            names[equation.outvars[0]] = names[equation.invars[0]]
            continue
        operands = [spell_operand(atom) for atom in equation.invars]
        names |= zip(equation.outvars, fresh)
        options = [f"{key}={value}" for key, value in sorted(equation.params.items()) if _is_plain(key, value)]
        yield " ".join([equation.primitive.name, *operands, *options])
        for inside in inner_jaxprs(equation):
            yield "{"
            yield from _lines(inside, numbers)
            yield "}"
    yield " ".join(["return", *(spell_operand(atom) for atom in closed.jaxpr.outvars)])


def _is_plain(key: str, value: Any) -> bool:
    """Whether an option of an equation is a number or the like, the same on every mesh and in every process."""
    if isinstance(value, tuple):
        return all(_is_plain(key, part) for part in value)
    return key != "name" and isinstance(value, int | float | str | np.dtype | np.generic | enum.Enum)


def _hash_constant(value: Any) -> str:
    x = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return f"{x.dtype}{list(x.shape)} {hash_of(np.ascontiguousarray(x).tobytes())}"


def method_name(number: str) -> str:
    """The name of the description of a run's model and method."""
    return f"methods/{number}.json"


def read_description(body: bytes, name: str = RUN_JSON) -> dict[str, Any]:
    """Reads what describes a run; raises DamagedError if it does not."""
    cure = "restore the file from a copy, or begin a new run in an empty folder, from a checkpoint"
    try:
        found = json.loads(body)
    # So are brackets that nest too deeply to be read.
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is no description of a run ({error}); {cure}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"{name} is no description of a run, it has {body[:40]!r}; {cure}")
    return found


# Opening a run, and finding it again


def is_on_disk(url: "str | os.PathLike[str] | SharedStore") -> bool:
    """Whether a store is a folder, in whose place another disk may be mounted at any time."""
    return not isinstance(url, SharedStore) and ("://" not in str(url) or str(url).startswith("file://"))


def find_run(get: Callable[[str], bytes | None], place: str) -> dict[str, Any]:
    """Which run is in a store.

    Raises:
      RunMissingError: there is none.
    """
    body = get(RUN_JSON)
    if body is None:
        raise RunMissingError(
            f"there is no run of islands in {place}: it has no run.json; give the URL that islands join, and mount its "
            "disk first"
        )
    return read_description(body)


def open_run(
    store: Connection, describe_own: Callable[[], dict[str, Any]], *, place: str, begin: bool, **chosen: int
) -> RunIdentity:
    """Finds the run in a store, or opens it, and compares its description with one's own.

    Args:
      describe_own: makes this island's description, which takes a while.
      begin: whether to open the run if there is none.
      **chosen: what the island that opens the run chooses for all, `keep_every` and `owners`.

    Raises:
      RunMismatchError: the descriptions differ; it names the first difference. Nothing was written.
      RunMissingError: there is no run, and `begin` is false or there are rounds of one.
    """
    is_new = begin and store.get(RUN_JSON) is None
    if is_new:
        _check_empty(store, place)
    else:
        find_run(store.get, place)
    started = store.now()
    own, number = describe_own(), None
    # What this process computes is no wait for the store.
    store.deadline += store.now() - started
    if is_new:
        number = store.agree(lambda: uuid.uuid4().hex)
        # By its number: `run.json` is asked for again and again, and has some bytes only.
        store.create(method_name(number), protocol.to_json(own))
        given = {name: choice for name, choice in chosen.items() if choice}
        # Of several islands that open the run at once, one is the first.
        store.create(RUN_JSON, protocol.to_json({"id": number, "format": protocol.FORMAT, **given}))
    theirs = find_run(store.get, place)
    if number is not None and theirs["id"] != number:
        # No run has this number.
        with suppress(ConnectionError):
            store.delete_many([method_name(number)])
    difference = find_difference(theirs | _read_method(store, theirs, place), own)
    if difference is not None:
        raise RunMismatchError(f"the run in {place} has another model or method than this island: {difference}")
    # A run of an earlier version has no owners.
    return RunIdentity(theirs["id"], theirs["keep_every"], theirs["id"] == number, place, theirs.get("owners", 0))


def _read_method(store: Connection, described: dict[str, Any], place: str) -> dict[str, Any]:
    """The description of a run's model and method; nothing of another format, which is a difference already."""
    if described.get("format") != protocol.FORMAT:
        return {}
    name = method_name(str(described.get("id")))
    body = store.get(name)
    if body is None:
        raise DamagedError(
            f"{place} has a run.json, and no {name}, which describes the method of its run; restore it from a copy, or "
            "begin a new run in an empty folder, from a checkpoint"
        )
    return read_description(body, name)


def check_same(store: Connection, run: RunIdentity) -> None:
    """Checks that the store still holds this run, since a disk may have been mounted in its place.

    Raises:
      RunMismatchError: it holds another.
      ConnectionError: it holds none, as a folder under which nothing is mounted.
    """
    body = store.get(RUN_JSON)
    if body is None:
        raise ConnectionError(
            f"run {run.id} is not in {run.place}: its run.json is missing; mount its disk again, or restore the file"
        )
    check_mark(str(read_description(body).get("id")), run, RUN_JSON)


def check_mark(found: str, run: RunIdentity, name: str) -> None:
    """Checks the number of a run, or its first digits, that a file has.

    Raises:
      RunMismatchError: it is that of another run.
    """
    if not found or not run.id.startswith(found):
        raise RunMismatchError(
            f"this island belongs to run {run.id}, and {name} in {run.place} to run {found or 'without a number'}: "
            "another disk is mounted there, or the folder was replaced; nothing of this island was counted in it. "
            "Mount the disk of its run, or start this island again to enter the other run"
        )


def _check_empty(store: Connection, place: str) -> None:
    """Checks that a store without a description has no rounds either, which would be those of another run."""
    names = store.list("anchors/") + store.list("rounds/")
    # Another island may have opened the run since.
    if names and store.get(RUN_JSON) is None:
        raise RunMissingError(
            f"{place} has rounds of a run ({names[-1]}) and no run.json: restore that file from a copy, or begin a new "
            "run in an empty folder, from a checkpoint"
        )


def log_entered(run: RunIdentity, number: int, kept: int, options: JoinOptions) -> None:
    """Says in the log which run an island has entered, and where."""
    if run.opened:
        logger.info("%s has opened run %s in %s", options.name, run.id, run.place)
    found = f"the kept global parameters of round {kept} and the {number - kept} rounds since"
    logger.info("%s is in run %s in %s at round %d: %s", options.name, run.id, run.place, number, found)
    if run.keep_every != options.keep_every:
        text = "%s keeps global parameters every %d rounds, as its run does, and not every %d"
        logger.info(text, options.name, run.keep_every, options.keep_every)
    if run.owners != options.owners:
        logger.info("%s takes owners=%d, as its run does, and not %d", options.name, run.owners, options.owners)


# Differences, in words


def find_difference(theirs: dict[str, Any], own: dict[str, Any]) -> str | None:
    """The first difference of two descriptions, and what to do; `None` if islands of both compute the same."""
    its, ours = theirs.get("format"), own["format"]
    if its != ours:
        return f"format: {its} in the run, {ours} here; use the version of jaxdist that opened it"
    # A run of an earlier version has no such lines, and one without fragments has none of these.
    theirs, own = {**DEFAULTS, "order": own["order"], **theirs}, {**DEFAULTS, **own}
    # One pair for each fragment. Where these differ, what is of the whole model tells so first.
    parts = zip(theirs.get("parts") or [{}], own.get("parts") or [{}], strict=False)
    for its, ours in parts:
        words = _find_shapes(theirs | its, own | ours) or _find_program(theirs | its, own | ours)
        if words is not None:
            return f"{words}; {NEW_RUN}"
    return None


def _find_shapes(theirs: dict[str, Any], own: dict[str, Any]) -> str | None:
    for key in KEYS:
        # Who only reads has parameters of any dtype.
        its, ours = theirs.get(key), own.get(key)
        if key not in own or its == ours:
            continue
        if key in ("reducer", "payload", "code") and theirs.get("call") != own["call"]:
            return _name_both("reducer", theirs.get("call"), own["call"])
        if key == "order":
            orders = show_orders(read_order(theirs["order"]), read_order(own["order"]))
            return _name_both("the leaves are in another order", *orders)
        if isinstance(its, dict) and isinstance(ours, dict):
            name = next(name for name in sorted({*its, *ours}) if its.get(name) != ours.get(name))
            key, its, ours = f"{key} {name!r}", its.get(name), ours.get(name)
        return _name_both(key, its, ours)
    return None


def _find_program(theirs: dict[str, Any], own: dict[str, Any]) -> str | None:
    versions, here = theirs.get("versions") or {}, own["versions"]
    for part, ours in own["programs"].items():
        its = (theirs.get("programs") or {}).get(part) or {}
        same_program = its.get("program") == ours["program"]
        # Another version of JAX may write the same program in another way.
        if its.get("result") == ours["result"] and (same_program or versions.get("jax") != here["jax"]):
            continue
        if same_program and (difference := _find_start(part, its.get("start") or {}, ours["start"])):
            return difference
        if same_program:
            return (
                f"{part}: the same program, which gives other bits here: another type of hardware, other versions "
                f"({versions} in the run, {here} here), or sums over entries that another mesh has cut in another way"
            )
        if part == "reducer" and theirs.get("call") != own["call"]:
            return _name_both(part, theirs.get("call"), own["call"])
        cause = "its arguments" if part == "reducer" else "momentum, nesterov, schedule or learning rate"
        words = f"{part}: equal shapes, another program ({cause})"
        return words + _name_numbers(its.get("numbers") or [], ours["numbers"])
    return None


def _find_start(part: str, its: dict[str, str], ours: dict[str, str]) -> str | None:
    for name, value in ours.items():
        if its.get(name) != value:
            cause = "its seed" if part == "reducer" else "a seed, or a number that its state holds"
            return _name_both(f"{part}: {name!r} begins with another value ({cause})", its.get(name), value)
    return None


def _name_both(part: str, its: Any, ours: Any) -> str:
    return f"{part}: {its} in the run, {ours} here"


def _name_numbers(its: list[str], ours: list[str]) -> str:
    """The numbers that only one of two programs has, as far as they fit into a message."""
    alone = [("the run", set(its) - set(ours)), ("this island", set(ours) - set(its))]
    words = [f"only {who} has {', '.join(sorted(some)[:MOST_NUMBERS])}" for who, some in alone if some]
    return f": of the numbers in it, {'; '.join(words)}" if words else ""
