"""A grace for islands that are late: once there is a quorum, a round waits for the others no longer than that.

All of it is on a clock that only sleeps move, so that waits and members are the same on every machine.
"""

import collections
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from island_paces import play_paces, stepping
from islands_run import commits_of

from jaxdist import islands
from jaxdist.islands.fragments import schedule_of
from jaxdist.local_sgd.local_steps import method_of

NAMES = ("a", "b", "c", "d")
# What looks at growing distances, and turns, add to a wait of half a second.
LOOKS = 0.3
# Rounds, of which the first ones, in which islands learn when to look, do not count.
LEARNED, ROUNDS = 5, 12


def play(paces, patch, *, meetings=ROUNDS, **options):
    """The ends of the rounds, and what became of islands that take so many seconds for a step."""
    store = islands.memory()
    found = play_paces(
        patch,
        NAMES[: len(paces)],
        lambda name, draws: paces[NAMES.index(name)],
        store=store,
        meetings=meetings,
        **options,
    )
    return commits_of(store), found


def waits_of(found, names):
    """Of the rounds until islands begin to leave."""
    reports = [report for name in names for report in found[name].reports]
    return [report.wait_seconds for report in reports if LEARNED <= report.round <= ROUNDS]


@pytest.mark.parametrize(("grace", "least", "most"), [(None, 3.9, 6.0), (0.5, 0.0, 0.5 + LOOKS)])
def test_a_straggler_holds_the_others_no_longer_than_the_grace(grace, least, most, monkeypatch):
    commits, found = play((1.0, 1.0, 1.0, 5.0), monkeypatch, quorum=3, grace=grace)
    waits = waits_of(found, "abc")
    assert least <= statistics.median(waits)
    assert max(waits) <= most
    # The first round waits for all of them; later ones have the steps of the straggler in one of a few.
    assert len(commits[0].members) == 4
    assert all(len(commit.members) >= 3 for commit in commits[1:ROUNDS])
    assert any("d" in [member.name for member in commit.members] for commit in commits[1:ROUNDS])


@pytest.mark.parametrize(("last", "members"), [(2.3, 3), (3.5, 2)])
def test_the_grace_begins_when_the_quorum_is_there(last, members, monkeypatch):
    """And not with an island's own progress, from which on the first one waits for longer than that in each round."""
    commits, _ = play((1.0, 2.0, last), monkeypatch, quorum=2, grace=0.6)
    sizes = [len(commit.members) for commit in commits[LEARNED : ROUNDS - 2]]
    assert min(sizes) == members


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_the_grace_begins_with_the_training_until_the_next_meeting(overlap, monkeypatch):
    """One step of an island takes 0.8 s longer: it counts if the others train meanwhile, and none waits for it."""
    store, late = islands.memory(), 5

    def pace(name, draws):
        steps[name] += 1
        return 1.8 if (name, steps[name]) == ("d", late) else 1.0

    steps, options = collections.Counter(), {"overlap": overlap, "quorum": 3, "grace": 0.5}
    found = play_paces(monkeypatch, NAMES, pace, store=store, meetings=ROUNDS, **options)
    missing = [commit.missing for commit in commits_of(store)[:10]]
    assert missing == [("d",) if not overlap and number == late - 1 else () for number in range(10)]
    if overlap:
        assert max(waits_of(found, NAMES)) <= LOOKS


@st.composite
def situations(draw, reducers=("exact",)):
    paces = draw(st.lists(st.sampled_from([0.5, 1.0, 1.2, 2.0, 5.0]), min_size=2, max_size=4))
    overlap = draw(st.booleans())
    options = {
        "quorum": draw(st.integers(1, len(paces))),
        "grace": draw(st.sampled_from([None, 0.0, 0.3, 1.0])),
        "overlap": overlap,
        "eager": overlap and draw(st.booleans()),
        "fragments": draw(st.sampled_from([1, 2, 4])),
        "round_timeout": draw(st.sampled_from([1.5, 20.0])),
        "reducer": draw(st.sampled_from(reducers)),
        "owners": draw(st.sampled_from([0, 3])),
    }
    return paces, options


def check_examples(paces, options):
    """What the rounds took of each island and fragment, and what is ahead, are all examples; no body counts twice."""
    with pytest.MonkeyPatch.context() as patch:
        commits, found = play(paces, patch, meetings=8, **options)
    number = options["fragments"]
    rounds = schedule_of(method_of(stepping(number)[0]))._replace(messages=1 + (options["reducer"] != "exact"))
    # A message before the last takes nothing.
    ends = [(rounds.fragment_in(i), commit) for i, commit in enumerate(commits) if rounds.merges_in(i)]
    members = [(fragment, member) for fragment, commit in ends for member in commit.members]
    assert max(collections.Counter(member.body for _, member in members).values(), default=1) == 1
    for name, played in found.items():
        counted = [0.0] * number
        for fragment, member in members:
            if member.name == name and member.body not in played.under_way:
                counted[fragment] += member.examples
        assert [x + y for x, y in zip(counted, played.ahead, strict=True)] == [played.trained] * number
    digests = collections.defaultdict(set)
    for played in found.values():
        for report in played.reports:
            digests[report.round].add(report.digest)
    assert all(len(one) == 1 for one in digests.values())
    for name, played in found.items():
        assert all(report.wait_seconds <= options["round_timeout"] + 1 for report in played.reports), name


@settings(max_examples=4)
@given(situations())
def test_nothing_is_lost_or_counted_twice(situation):
    check_examples(*situation)


@pytest.mark.slow
@settings(max_examples=150)
@given(situations(["exact", "low rank with feedback"]))
def test_nothing_is_lost_or_counted_twice_in_many_situations(situation):
    check_examples(*situation)


def test_a_grace_is_no_longer_than_the_timeout():
    tx = stepping(1)[0]
    for grace in (-1.0, 11.0, float("nan")):
        with (
            pytest.raises(ValueError, match=r"grace must be in \[0, 10\.0\], got .*no island waits longer"),
            islands.join(islands.memory(), tx, name="a", round_timeout=10, grace=grace),
        ):
            pass
