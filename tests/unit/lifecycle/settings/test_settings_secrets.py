"""Secrets: given like any setting or in a file, and shown nowhere."""

import json
import pickle
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import Hive, Secret, Settings, SettingsError, Sources, config, module
from lifecycle.settings import RenamedFrom
from lifecycle.settings.durations import Duration
from lifecycle.settings.options import options_of
from lifecycle.settings.sources import load
from lifecycle.settings.values import show
from tests.support.examples import scaled


class Login(Settings, frozen=True):
    user: str = "admin"
    token: Annotated[Secret, RenamedFrom("password")] = Secret("nothing-yet")
    keys: dict[str, Secret] = {}  # noqa: RUF012  # copied for every struct
    spare: Secret | None = None


class Codes(Settings, frozen=True):
    codes: tuple[Secret, ...] = ()
    limit: Duration = Duration(1)


def login(*argv: str, env: dict[str, str] | None = None, config_dir: Path | None = None) -> Login:
    hive = Hive(config(Login), settings=Sources(argv, env, config_dir))
    hive.check()
    return load([Login], Sources(argv, env, config_dir)).structs[Login]  # type: ignore[return-value]  # of that type


def faults(*argv: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        Hive(config(Login), settings=Sources(argv, env)).check()
    return [fault.text for fault in caught.value.faults]


def test_a_secret_is_given_as_any_setting(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t3\n")
    assert login("--token=t1").token.reveal() == "t1"
    assert login(env={"HIVE_TOKEN": "t2"}).token.reveal() == "t2"
    assert login(config_dir=tmp_path).token.reveal() == "t3"
    assert login("--keys=a=1,b=2").keys == {"a": Secret("1"), "b": Secret("2")}
    assert login("--spare=").spare is None


def test_a_secret_may_be_in_a_file_that_flag_variable_or_config_dir_name(tmp_path: Path) -> None:
    file = tmp_path / "mounted"
    file.write_text(" s p a c e d \r\n")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "token-file").write_text(f"{file}\n")
    for found in (
        login(f"--token-file={file}"),
        login(env={"HIVE_TOKEN_FILE": str(file)}),
        login(config_dir=tmp_path / "config"),
    ):
        assert found.token == Secret(" s p a c e d ")
    (setting,) = [
        setting
        for setting in Hive(config(Login), settings=Sources([f"--token-file={file}"])).settings()
        if setting.option.name == "token"
    ]
    assert setting.origin == "flag --token-file"


def test_a_file_of_a_secret_that_is_empty_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_text("\n")
    for name in ("token", "spare"):
        assert faults(f"--{name}-file={file}") == [
            f"--{name}-file={file}: it is empty; expected a file that holds the value"
        ]
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "token").write_text(" \n")
    (tmp_path / "config" / "keys").write_text("")
    found = load([Login], Sources(config_dir=tmp_path / "config"))
    assert [fault.text for fault in found.faults] == [
        f"{tmp_path}/config/token: it is empty; expected the value, or no such file"
    ]


def test_the_place_that_counts_more_wins_whether_it_gives_the_secret_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mounted"
    file.write_text("in the file")
    assert login(f"--token-file={file}", env={"HIVE_TOKEN": "t"}).token.reveal() == "in the file"
    assert login("--token=t", env={"HIVE_TOKEN_FILE": str(file)}).token.reveal() == "t"
    assert faults("--token=t", f"--token-file={file}") == [
        f"--token=(hidden) and --token-file={file}: give one of them"
    ]


def test_an_unreadable_secret_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    expected = "expected a file that holds the value"
    assert faults(f"--token-file={tmp_path}/none", f"--spare-file={tmp_path}/binary") == [
        f"--token-file={tmp_path}/none: no such file or directory; {expected}",
        f"--spare-file={tmp_path}/binary: it is not UTF-8 text; {expected}",
    ]
    assert faults("--token-file=") == [f"--token-file=: {expected}"]


SECRETS = st.text("QZXJV", min_size=5)


@settings(max_examples=scaled(25), deadline=None)
@given(SECRETS)
def test_a_secret_is_in_no_error_warning_graph_or_text(secret: str) -> None:
    written: list[Sources | dict[str, object]] = [
        Sources(["--user=u", f"--token={secret}", f"--spare={secret}", f"--keys=a={secret}"]),
        Sources(env={"HIVE_TOKEN": secret, "HIVE_KEYS": secret, "HIVE_CODES": secret}),
        Sources([f"--password={secret}", f"--keys={{{secret}", f"--codes={secret}", "--limit=x"]),
        Sources([f"--tokne={secret}", "--tokne", secret, f"-token={secret}", f"token={secret}"]),
        {"token": secret, "keys": [secret], "codes": {secret: secret}, "spare": 5, "unknown": secret},
    ]
    for source in written:
        loaded = load([Login, Codes], source)
        hive = Hive(module("m", "M", config(Login, Codes)), settings=source)
        texts = [repr(loaded.settings), repr(loaded.structs), repr(loaded.faults), repr(loaded.warnings)]
        try:
            graph = hive.graph()
        except SettingsError as error:
            texts += [str(error), repr(error)]
        else:
            texts += [graph.json(), graph.tree(), graph.dot(), repr(graph), repr(hive.settings())]
        assert not any(secret in text for text in texts)


def test_a_secret_prints_as_hidden_and_nothing_makes_it_readable_by_chance() -> None:
    secret = Secret("s3same")
    assert [str(secret), repr(secret), f"{secret}", f"{secret!r}", show(secret)] == ["(hidden)"] * 5
    assert repr(Login(token=secret)) == ("Login(user='admin', token=(hidden), keys={}, spare=None)")
    assert not hasattr(secret, "__dict__")
    for write in (json.dumps, msgspec.json.encode, msgspec.to_builtins, pickle.dumps):
        with pytest.raises(TypeError):
            write(secret)


def test_a_logged_secret_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    for renderer in (
        structlog.processors.JSONRenderer(),
        structlog.processors.LogfmtRenderer(),
        structlog.dev.ConsoleRenderer(colors=False),
    ):
        logger = structlog.wrap_logger(structlog.PrintLogger(), processors=[renderer])
        logger.info("login", token=Secret("s3same"), settings=Login(token=Secret("s3same")))
    printed = capsys.readouterr().out
    assert printed.count("(hidden)") == 6
    assert "s3same" not in printed


def test_secrets_are_compared_by_their_text() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("ä")}) == 2
    assert Secret("ä") == Secret("ä")
    assert (bool(Secret("")), bool(Secret("a"))) == (False, True)


def test_only_a_plain_secret_has_a_file_option() -> None:
    assert [option.file_name for option in options_of(Login)] == [None, "token-file", None, "spare-file"]
    assert [option.secret for option in options_of(Login)] == [False, True, True, True]
