"""A hive as a command: its help, its checks, its views, its completion, its run; unknown keys of settings."""

import signal
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from lifecycle import (
    Duration,
    Hive,
    Hook,
    Lifecycle,
    Settings,
    Sources,
    config,
    invoke,
    module,
    provide,
    seconds,
)
from lifecycle.command.main import COMMANDS, run_command
from tests.unit.lifecycle.command.run import command

__all__ = ["command"]


class BeatSettings(Settings, frozen=True):
    """Settings of the heartbeat."""

    file: Path = Path("heartbeat")
    """File to write."""

    every: Duration = seconds(10)
    """Time between two beats."""

    rhythm: Literal["even", "odd"] = "even"
    """How it beats."""

    loud: bool = False


class TokenSettings(Settings, frozen=True):
    token: str
    """Who we are."""


class Beat:
    def __init__(self, settings: BeatSettings, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("beat"))


class Login:
    def __init__(self, settings: TokenSettings, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("log in"))


class Watch:
    def __init__(self, login: Login, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("watch"))


beat = module("beat", "Heartbeat file", config(BeatSettings), provide(Beat), invoke(Beat))
login = module("login", "Login", config(TokenSettings), provide(Login, Watch), invoke(Watch))


def heart(sources: Sources | None = None) -> Hive:
    return Hive(beat, settings=sources, name="heart")


def test_the_help_has_every_setting_with_help_default_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(heart(), ["--help"], {}, version="1.0") == 0
    printed = capsys.readouterr().out
    assert "--version" in printed
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert printed.endswith(
        textwrap.dedent("""\
        Settings. The first of these that has it: a flag (--name=value), else a variable
        (HEART_NAME), else a file of that name in the directory given as --config-dir
        (HEART_CONFIG_DIR), else the default in brackets.

        beat: Heartbeat file
          --file PATH             File to write. [heartbeat]
          --every DURATION        Time between two beats. [10s]
          --rhythm EVEN|ODD       How it beats. [even]
          --loud BOOL             [false]
        """)
    )
    assert max(map(len, printed.splitlines())) <= 80


def test_version_prints_the_version_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(heart(), ["--version"], {}, version="1.0") == 0
    assert capsys.readouterr().out == "heart 1.0\n"
    assert run_command(heart(), ["--version"], {}) == 2
    assert capsys.readouterr().err == "heart: --version: no such setting\n"


def test_check_prints_the_contents_or_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(heart(), ["check", "--every=1s"], {"HEART_LOUD": "true"}) == 0
    assert capsys.readouterr().out == "heart is sound: 2 constructors, 1 hooks, 2 settings given\n"
    assert run_command(heart(), ["check", "--every=fast", "--fille=x"], {}) == 2
    assert capsys.readouterr().err.splitlines() == [
        "heart: --fille: no such setting; did you mean --file?",
        "heart: --every=fast: expected a duration such as 15s, 2m0s or 100ms",
    ]
    assert run_command(Hive(login, name="heart"), ["check"], {}) == 2
    assert "token is required: give --token, HEART_TOKEN" in capsys.readouterr().err
    assert run_command(Hive(invoke(lambda: 1 / 0), name="heart"), ["check"], {}) == 1
    assert "raised ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["inspct"], "heart: inspct: no such command; did you mean inspect? (see: heart --help)\n"),
        (["inspect", "forest"], "heart: forest: no such view; expected one of tree, settings,"),
        (["inspect", "why"], "heart: inspect why: expected a type\n"),
        (["inspect", "tree", "beet"], "heart: module beet: no such module; did you mean beat?\n"),
        (["completion", "csh"], "heart: completion: expected one of bash, zsh, fish\n"),
    ],
)
def test_a_wrong_command_gets_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(heart(), words, {}) == 2
    assert capsys.readouterr().err.startswith(text)


def shown(capsys: pytest.CaptureFixture[str], *words: str, hive: Hive | None = None) -> str:
    assert run_command(hive or heart(), ["inspect", *words], {}) == 0
    return capsys.readouterr().out


def test_inspect_shows_every_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  beat  Heartbeat file\n" in shown(capsys)
    assert "  every = 2s  (flag --every)\n" in shown(capsys, "settings", "--every=2s")
    assert shown(capsys, "hooks") == "  1  beat  beat\n"
    assert shown(capsys, "unused") == "Everything that is provided is needed.\n"
    assert "  1. invoked Beat (beat)\n     needs Beat (beat) as instance\n" in shown(capsys, "why", "Beat")
    assert shown(capsys, "tree", "beat").startswith("beat  Heartbeat file\n")
    assert shown(capsys, "dot").startswith("digraph")
    assert shown(capsys, "mermaid").startswith("flowchart")
    assert shown(capsys, "json").startswith("{")
    assert shown(capsys, "html").startswith("<!doctype html>")


def test_inspect_works_without_required_settings_and_shows_them_as_unset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hive = Hive(beat, login, name="heart")
    assert run_command(hive, ["inspect"], {}) == 0
    printed = capsys.readouterr()
    assert "· set     1 setting, 1 required and unset\n" in printed.out
    assert "· hook    beat\n" in printed.out
    assert "hook    watch" not in printed.out
    assert "not needed" not in printed.out
    assert printed.err == "heart: not set, so the hooks of what needs it are left out: token\n"
    assert "hook    watch" in shown(capsys, "--token=x", hive=Hive(beat, login, name="heart"))
    assert run_command(Hive(beat, login, name="heart"), ["inspect", "unused"], {}) == 0
    assert capsys.readouterr().out == "Everything that is provided is needed.\n"


def test_a_command_after_settings_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Hive(beat, name="heart"), ["--every=2s", "check"], {}) == 2
    message = "heart: check: not expected here; settings are --name=value; a command comes first\n"
    assert capsys.readouterr().err == message


def test_inspect_draws_a_graph_with_faults_and_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    hive = Hive(beat, module("more", "More", invoke(needs_what_is_missing)), name="heart")
    assert run_command(hive, ["inspect"], {}) == 1
    printed = capsys.readouterr()
    assert "· invoke  needs_what_is_missing <- bytes (missing)\n" in printed.out
    assert printed.err.startswith("heart: heart cannot be built: 1 fault\nmissing: nothing provides bytes\n")
    assert run_command(hive, ["inspect", "dot"], {}) == 1
    assert '"missing bytes" [label="bytes\\nmissing"' in capsys.readouterr().out


def needs_what_is_missing(it: bytes) -> None: ...


def given(tmp_path: Path, **sources: Any) -> tuple[list[str], list[str]]:
    """What is warned of, and what is refused, of a config-dir and variables with strangers in them."""
    (tmp_path / "fille").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "every~").write_text("x")
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "all.yaml").write_text("evry: 3s\nloud: true\n")
    env = {"HEART_RHYTM": "odd", "HEART_SERVICE_HOST": "10.0.0.1", "HEART_PORT_80_TCP": "x", "OTHER": "x"}
    hive = heart(Sources((), env, tmp_path, yaml_name="all.yaml", **sources))
    return hive.warnings(), [fault.text for fault in hive._loaded.faults]


STRANGERS = [
    "HEART_RHYTM: no such setting; did you mean HEART_RHYTHM?",
    "{}/all.yaml: evry: no such setting; did you mean every?",
    "file {}/fille: no such setting; did you mean file?",
]


def test_unknown_keys_are_warned_of_with_what_is_near(tmp_path: Path) -> None:
    expected = [f"{text.format(tmp_path)}; it is ignored" for text in STRANGERS]
    warned, refused = given(tmp_path)
    assert (sorted(warned), refused) == (sorted(expected), [])


def test_unknown_keys_are_refused_or_ignored_where_that_is_asked_for(tmp_path: Path) -> None:
    warned, refused = given(tmp_path, unknown="refuse")
    assert (warned, sorted(refused)) == ([], sorted(text.format(tmp_path) for text in STRANGERS))
    assert given(tmp_path, unknown="ignore") == ([], [])


def test_keys_of_other_programs_are_no_strangers(tmp_path: Path) -> None:
    assert given(tmp_path, others=["rhytm", "fille"])[0] == [
        f"{STRANGERS[1].format(tmp_path)}; it is ignored"
    ]
    refused = given(tmp_path, unknown="refuse", others=["rhytm", "fille", "evry"])
    assert refused == ([], [])


def test_a_mounted_config_map_may_have_strangers(tmp_path: Path) -> None:
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026/fille").write_text("x")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "fille").symlink_to("..data/fille")
    hive = heart(Sources(config_dir=tmp_path))
    assert hive.warnings() == [f"file {tmp_path}/fille: no such setting; did you mean file?; it is ignored"]


def test_strict_refuses_what_a_check_warns_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(heart(), ["check"], {"HEART_EVRY": "1s"}) == 0
    warned = "heart: HEART_EVRY: no such setting; did you mean HEART_EVERY?"
    assert capsys.readouterr().err == f"{warned}; it is ignored\n"
    assert run_command(heart(), ["check", "--strict"], {"HEART_EVRY": "1s"}) == 2
    assert capsys.readouterr().err == f"{warned}\n"


def completed(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run_command(heart(), ["completion", "words", line], {}, version="1") == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("heart ", list(COMMANDS)),
        ("heart in", ["inspect"]),
        ("heart inspect ho", ["hooks"]),
        ("heart completion ", ["bash", "zsh", "fish"]),
        ("heart --r", ["--rhythm="]),
        ("heart check --l", ["--loud"]),
        ("heart --rhythm=", ["--rhythm=even", "--rhythm=odd"]),
        ("heart --rhythm o", ["odd"]),
        ("heart --file=", []),
        ("heart --", ["--config-dir=", "--every=", "--file=", "--help", "--loud", "--rhythm=", "--strict"]),
    ],
)
def test_completion_lists_the_candidates_for_a_word(
    line: str, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [one for one in completed(line, capsys) if one != "--version"] == list(words)


def test_without_a_command_it_runs_until_a_signal(command: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [command, "--every=1s"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stderr is not None
        started = process.stderr.readline()
        while "started" not in started:
            assert started
            started = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
