import contextlib
import json

import pytest

from jaxdist._cli import main as cli

SMALL = [
    "replay",
    "--workers",
    "4",
    "--seconds",
    "3",
    "--model",
    "convnet:1",
    "--batch",
    "4",
    "--slow",
    "4x",
    "--seed",
    "3",
]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    out = tmp_path_factory.mktemp("replay")
    arguments = ["--rule", "ringmaster:3", "bsp", "--events", str(out / "log.jsonl"), "--out", str(out)]
    with contextlib.redirect_stdout(open(out / "printed", "w")) as printed:
        code = cli.main([*SMALL, *arguments, "--gradient", "f16", "--link", "1gbit,1ms", "--target", "99"])
        printed.close()
    return code, out, (out / "printed").read_text()


def test_replay_leaves_a_plot_and_a_table(replayed):
    code, out, printed = replayed
    assert code == 0
    assert (out / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out loss" in printed
    assert "ringmaster:3" in printed
    assert str(out / "replay.png") in printed


def test_replay_writes_every_event(replayed):
    lines = [json.loads(line) for line in (replayed[1] / "log.jsonl").read_text().splitlines()]
    assert {line["rule"] for line in lines} == {"ringmaster:3", "bsp"}
    ticks = [line["tick"] for line in lines if line["rule"] == "bsp"]
    assert ticks == sorted(ticks)
    assert ticks[-1] <= 3e9
    up = {line["bytes"] for line in lines if line["kind"] == "gradient"}
    down = {line["bytes"] for line in lines if line["kind"] == "params"}
    assert len(up) == len(down) == 1
    assert 2 * max(up) == max(down)


def test_equal_seeds_write_equal_files(tmp_path):
    events = [tmp_path / "logs" / name for name in ("one", "two")]
    for path in events:
        arguments = ["--rule", "asgd", "--timing-only", "--events", str(path), "--out", str(tmp_path)]
        assert cli.main([*SMALL, *arguments]) == 0
    assert events[0].read_bytes() == events[1].read_bytes()
    assert len(events[0].read_bytes()) > 500


@pytest.mark.slow
def test_gradients_may_take_longer_than_the_longest_clock(tmp_path, capsys):
    arguments = ["replay", "--rule", "asgd", "--timing-only", "--workers", "2", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--law", "constant:1e300", "--seconds", "9e9"]) == 0
    assert "asgd      0" in capsys.readouterr().out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--rule", "ringmastr:3"],
            "unknown rule 'ringmastr:3'; did you mean ringmaster? known: bsp, backup_workers:SPARE",
        ),
        (["--rule", "ringmaster"], "missing a required argument: 'max_delay'"),
        (["--rule", "ringmaster:0"], "max_delay must be at least 1, got 0"),
        (["--rule", "backup_workers:4"], "spare must be less than the 4 workers, got 4"),
        (["--rule", "hop:ringg"], "unknown graph 'ringg'; did you mean ring? known: ring, directed-ring"),
        (["--rule", "hop:ring,backup=1"], "backup=1 needs token queues"),
        (["--rule", "hop", "--gradient", "f16"], "sends models, and no gradients"),
        (["--rule", "prague:2", "--gradient", "f16"], "sends models, and no gradients"),
        (["--rule", "prague:5"], "group_size must be at most the 4 workers, got 5"),
        (["--slow", "fast"], "--slow must be a factor such as 4x, got 'fast'"),
        (["--random-slow", "6x"], "--random-slow must be a factor and a probability, as in 6x,0.1"),
        (["--failures", "3"], "--failures must be the mean seconds up and down"),
        (["--law", "gauss:1"], "unknown law 'gauss:1'"),
        (["--law", "constant:-1"], "seconds must be positive and finite, got -1"),
        (["--law", "constant:1e999"], "seconds must be positive and finite, got inf"),
        (["--seconds", "inf"], "--seconds must be finite, got inf"),
        (["--seconds", "1e300"], "--seconds must be at most 9.2e+09, which is 292 years, got 1e+300"),
        (["--target", "nan"], "--target must be positive, got nan"),
        (["--target", "2"], "--target needs losses: leave out --timing-only"),
        (["--slow", "4x,7"], "--slow must be a factor such as 4x, got '4x,7'"),
        (["--random-slow", "6x,0.1,3"], "--random-slow must be a factor and a probability, as in 6x,0.1"),
        (["--link", "fast"], "a link is a bandwidth and a latency"),
        (["--recorded", "/no/such/file"], "No such file"),
        (["--skew", "0.1", "--workload", "text", "--model", "gpt:tiny"], "--skew is for the workload 'digits'"),
        (["--workers", "0"], "--workers must be positive, got 0"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SMALL, "--timing-only", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("jaxdist: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
