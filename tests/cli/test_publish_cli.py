"""`jaxdist publish` shows what is published, names damage, and cleans up."""

import jax.numpy as jnp
import pytest

from jaxdist import publish
from jaxdist._cli import main as cli


@pytest.fixture
def folder(tmp_path):
    params = {"w": jnp.zeros(1000)}
    with publish.open(tmp_path, dtype=jnp.bfloat16, anchor_every=3) as out:
        for step in range(6):
            params = {"w": params["w"].at[step].set(1)}
            out.put(params, step=10 * step)
            out.flush()
    return tmp_path


def test_a_folder_is_shown_and_cleaned(folder, capsys):
    assert cli.main(["publish", str(folder), "--last", "2"]) == 0
    shown = capsys.readouterr().out
    assert "6 states of 1 leaves, 2.0 kB each" in " ".join(shown.split())
    assert "50" in shown
    assert "20" not in shown.splitlines()[-2]
    assert cli.main(["publish", str(folder), "--keep", "2", "--older", "1"]) == 0
    assert "0 names deleted" in capsys.readouterr().out
    assert cli.main(["publish", str(folder), "--keep", "2"]) == 0
    assert "6 names deleted" in capsys.readouterr().out


def test_damage_is_named(folder, capsys):
    (folder / "commits/00000005").write_bytes(b"{}")
    (folder / "notes.txt").write_text("mine")
    assert cli.main(["publish", str(folder)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "notes.txt is foreign" in shown
    assert "commits/00000005 is no record" in shown


def test_altered_bytes_are_found_on_request(folder, capsys):
    (patch,) = (folder / "patches").glob("00000005-*")
    patch.write_bytes(patch.read_bytes()[:-1] + b"?")
    assert cli.main(["publish", str(folder)]) == 0
    assert cli.main(["publish", str(folder), "--verify"]) == 1
    assert f"patches/{patch.name} has other bytes than its hash says" in " ".join(capsys.readouterr().out.split())
    patch.write_bytes(patch.read_bytes()[:-1])
    assert cli.main(["publish", str(folder)]) == 1
    assert "is cut or too long" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_work_is_one_line(tmp_path, capsys):
    assert cli.main(["publish", str(tmp_path)]) == 2
    assert "nothing is published" in capsys.readouterr().err
    assert cli.main(["publish", str(tmp_path), "--older", "3"]) == 2
    assert "give --keep" in capsys.readouterr().err
