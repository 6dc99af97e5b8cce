"""``--help``: every command is in a section of the overview, with valid examples."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest

from hive.examples import EXAMPLES
from hive.main import COMMANDS, GROUPS, cli
from hive.observe.hubble import run as hubble
from tests.support.command_line import hive

Words = tuple[str, ...]
HUBBLE_COMMANDS = (
    ("observe", "agent-events"),
    ("observe", "debug-events"),
    ("status",),
    ("list", "nodes"),
    ("list", "namespaces"),
    ("watch", "peers"),
)
"""Those of ``hubble``, beside ``hubble observe``."""
WHOLE = re.compile(r" +(hive .*|--[a-z-]+ (list of )?[a-z|-]+)$")
"""Lines that are copied, and an option with a word that stands for all of its values."""


def leaves(command: click.Command, words: Words = ()) -> Iterator[tuple[Words, click.Command]]:
    """Every command that is not a group, with its words."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        if not child.hidden:
            yield from leaves(child, (*words, name))


def test_the_overview_has_every_command_once() -> None:
    named = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(named) == sorted(COMMANDS)


def test_every_command_has_examples_that_it_takes() -> None:
    commands = dict(leaves(cli))
    root = click.Context(cli, **cli.context_settings)  # click remembers the names of its help option
    assert {" ".join(words) for words in commands} == EXAMPLES.keys()
    for words, command in commands.items():
        for line in EXAMPLES[" ".join(words)]:
            given = shlex.split(line.removeprefix("source <(").removesuffix(")").partition(" > ")[0])
            assert tuple(given[: len(words) + 1]) == ("hive", *words), line
            context = click.Context(command, parent=root, **command.context_settings)
            command.make_parser(context).parse_args(given[len(words) + 1 :])


def helps(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """What ``--help`` of a command prints, and of all below it."""
    settings: dict[str, Any] = {**command.context_settings, "terminal_width": 80, "max_content_width": 80}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            assert child is not None
            yield from helps(child, word, context)


def test_help_fits_on_a_terminal_of_80_columns() -> None:
    for text in helps(cli, "hive"):
        wide = [line for line in text.splitlines() if len(line) > 80]
        assert not wide, f"{text.splitlines()[0]}: {wide}"


@pytest.mark.parametrize(
    "words",
    [
        ("api",),
        *(
            ("policy", "explain", "--manifests", "docs/examples/shop", "shop/frontend", to)
            for to in ("shop/cart", "shop/postgres:5432")
        ),
    ],
)
def test_texts_fit_on_a_terminal_of_80_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.output.terminal_width", lambda **_: 80)
    out = hive(capsys, *words).out
    assert out
    assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", [("endpoint", "labels"), ("status",), ("lab", "up")])
def test_examples_stand_below_the_options(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    out = hive(capsys, *words, "--help").out
    examples = out.partition("Examples:\n")[2].split("\n")
    assert [line.strip() for line in examples if line] == list(EXAMPLES[" ".join(words)])


def test_the_version_is_shown_without_an_agent(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "version", "--socket", "/nonexistent")
    assert result.code == 0
    assert result.out.splitlines()[1].split(maxsplit=1) == ["agent", "none runs here"]


def test_observe_is_called_in_help_and_errors_as_it_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    for part in ((), ("agent-events",), ("debug-events",)):
        own = hive(capsys, "observe", *part, "--help").out
        assert hubble(["observe", *part, "--help"]) == 0
        other = capsys.readouterr().out
        assert " ".join(("Usage: hive observe", *part, "[FLAGS]")) in own.splitlines()
        assert own.replace("Usage: hive ", "Usage: hubble ") == other
    assert hubble(["observe", "nothing"]) == 1
    assert capsys.readouterr().err == 'unknown command "nothing" for "hubble observe"\n'
    wrong = hive(capsys, "observe", "nothing")
    assert wrong.code == 2
    assert 'unknown command "nothing" for "hive observe"' in wrong.err


def test_all_help_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {words[:length] for words, _ in leaves(cli) for length in range(len(words))}
    shown = [hive(capsys, *words, "--help").out for words in (*groups, *dict(leaves(cli)))]
    for words in HUBBLE_COMMANDS:
        assert hubble([*words, "--help"]) == 0
        shown.append(capsys.readouterr().out)
    lines = {line for text in shown for line in text.splitlines()}
    assert [line for line in lines if len(line) > 80 and not WHOLE.match(line)] == []
    assert "  -f, --follow                  Continue with new flows." in lines
