"""Every `jaxdist` command in a shell block of a page: the parser takes its options, and the names in it exist.

None of them is run here; `test_page_runs.py` runs those that do not need a pod, a bucket or a scheduler.
"""

import shlex
from types import SimpleNamespace

import pytest
from page_commands import commands

from jaxdist._cli import main as cli
from jaxdist._cli.spellings import parse
from jaxdist.processes.launch import __main__ as launcher

STEPS = 1000


def parsed(words, monkeypatch):
    """The options of a command, which is not run."""
    chosen = []
    parsers = {name: (options, chosen.append) for name, (options, _) in cli.COMMANDS.items()}
    monkeypatch.setattr(cli, "COMMANDS", parsers)
    assert cli.main(words) == 0
    return chosen[0]


def check_names(options):
    """Parses what options name: reducers, methods of synchronization, rules, optimizers, links, models."""
    # A suite has optimizers of its own.
    optimizer = getattr(options, "optimizer", None) or "adamw:1e-3"
    parse.parse_optimizer(optimizer, STEPS)
    named = {}
    for field in ("reducer", "reducers", "sync", "rule", "gradient", "link", "model"):
        value = getattr(options, field, None) or ()
        texts = (value,) if isinstance(value, str) else value
        # Modules of the reader are made by the pages that name them.
        named[field] = [text for text in texts if isinstance(text, str) and "my_" not in text]
    for name in (*named["reducer"], *named["reducers"], *named["sync"]):
        parse.parse_method(name, optimizer, STEPS)
    for rule in named["rule"]:
        parse.parse_rule(rule, parse.parse_optimizer(optimizer), None)
    for code in named["gradient"]:
        parse.parse_reducer(code)
    if getattr(options, "bibtex", False):
        parse.find_methods(options.name)
    for link in named["link"]:
        if link != "measured":
            parse.parse_link(link)


def test_there_are_commands_to_check():
    assert len(commands()) > 80
    assert {words[0] for words in commands()} >= {"train", "compare", "plan", "replay", "launch", "goodput"}


@pytest.mark.parametrize("command", ["launch", *cli.COMMANDS])
def test_the_commands_of_pages_are_understood(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, pages in commands().items():
        if words[0] != command:
            continue
        try:
            if command == "launch":
                assert launcher._parser().parse_args(words[1:]).script
            else:
                with monkeypatch.context() as patch:
                    options = parsed(words, patch)
                check_names(options)
        except (SystemExit, AssertionError, ValueError) as problem:
            said = capsys.readouterr()
            pytest.fail(f"{', '.join(pages)}: jaxdist {shlex.join(words)}: {problem} {said.err or said.out}")


def test_a_command_that_no_longer_exists_would_be_noticed(monkeypatch, capsys):
    with pytest.raises(SystemExit), monkeypatch.context() as patch:
        parsed(("train", "--no-such-option", "3"), patch)
    with pytest.raises(AssertionError), monkeypatch.context() as patch:
        parsed(("trains",), patch)
    with pytest.raises(ValueError, match="unknown reducer 'qsdg'"):
        check_names(SimpleNamespace(reducer="qsdg"))
