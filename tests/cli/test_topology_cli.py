"""`jaxdist topology`."""

import pytest

from jaxdist._cli import main as cli


@pytest.mark.parametrize("name", ["one-peer-exponential", "binary-tree"])
def test_topology_prints_and_draws(name, tmp_path, capsys):
    assert cli.main(["topology", name, "--workers", "8", "--png", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ("spectral gap: 1.0000" in printed) == (name == "one-peer-exponential")
    assert (tmp_path / f"{name}-8.png").read_bytes().startswith(b"\x89PNG")


def test_topology_says_what_there_is(capsys):
    assert cli.main(["topology", "rink"]) == 2
    assert "unknown graph 'rink'; did you mean ring? known: ring, directed-ring" in capsys.readouterr().err
    assert cli.main(["topology", "torus", "--workers", "7"]) == 2
    assert "use ring" in capsys.readouterr().err
    assert cli.main(["topology", "ring", "--workers", "100000000"]) == 2
    assert "--workers must be at most 4096" in capsys.readouterr().err
