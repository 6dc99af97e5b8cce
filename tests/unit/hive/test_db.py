"""``hive db``: output and errors."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from hive.agent.db import describe, render
from tests.support.command_line import hive
from tests.unit.hive.stub_agent import stub_agent

ROWS = [
    {"rev": 4, "key": 1, "obj": {"ifindex": 1, "name": "lo", "up": True, "addresses": [], "kind": ""}},
    {
        "rev": 9,
        "key": 2,
        "obj": {
            "ifindex": 2,
            "name": "eth0",
            "up": False,
            "addresses": ["192.0.2.1/24", "192.0.2.2/24"],
            "kind": "",
        },
    },
]
TABLES = [
    {"name": "devices", "rows": 2, "revision": 9, "initialized": True, "waits-for": []},
    {"name": "pods", "rows": 0, "revision": 0, "initialized": False, "waits-for": ["kubernetes"]},
]
SHOW = {"/statedb/dump/devices": (200, {"devices": ROWS})}


def test_tables_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {"/statedb/tables": (200, TABLES)}) as agent:
        result = hive(capsys, "db", "list", "-H", agent.socket)
        as_json = hive(capsys, "db", "list", "-H", agent.socket, "-o", "json")
    assert [line.split(maxsplit=3) for line in result.out.splitlines()] == [
        ["TABLE", "ROWS", "REVISION", "STATE"],
        ["devices", "2", "9", "complete"],
        ["pods", "0", "0", "waits for kubernetes"],
    ]
    assert json.loads(as_json.out) == TABLES


def test_rows_are_shown_without_columns_that_are_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, SHOW) as agent:
        result = hive(capsys, "db", "show", "devices", "-H", agent.socket)
        some = hive(capsys, "db", "show", "devices", "-H", agent.socket, "--columns", "name,kind")
        as_json = hive(capsys, "db", "show", "devices", "-H", agent.socket, "-o", "json")
    assert result.out.splitlines() == [
        "IFINDEX   NAME   UP    ADDRESSES",
        "1         lo     yes",
        "2         eth0   no    192.0.2.1/24, 192.0.2.2/24",
    ]
    assert [line.split() for line in some.out.splitlines()] == [["NAME", "KIND"], ["lo"], ["eth0"]]
    assert json.loads(as_json.out) == ROWS


def test_one_row_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, SHOW) as agent:
        result = hive(capsys, "db", "show", "devices", "2", "-H", agent.socket)
        absent = hive(capsys, "db", "show", "devices", "3", "-H", agent.socket)
    assert [line.split(maxsplit=1) for line in result.out.splitlines()] == [
        ["ifindex:", "2"],
        ["name:", "eth0"],
        ["up:", "no"],
        ["addresses:", "192.0.2.1/24, 192.0.2.2/24"],
        ["kind:"],
    ]
    assert (absent.code, absent.err) == (1, "hive: table devices has no row with the key 3\n")


def test_a_narrow_terminal_gets_the_columns_that_fit_and_the_names_of_the_others() -> None:
    lines = [click.unstyle(line) for line in render(ROWS, 40)]
    assert lines == [
        "IFINDEX   NAME   UP",
        "1         lo     yes",
        "2         eth0   no",
        "not shown: addresses (--columns, --wide,",
        "-o json, or name a key)",
    ]
    wide_first = [{"rev": 1, "key": "a", "obj": {"id": "a", "long": "x" * 70, "state": "ready"}}]
    assert click.unstyle(render(wide_first, 60)[1]).split() == ["a", "ready"]
    assert click.unstyle(render([], 80)[-1]) == "no rows"
    assert render([{"rev": 1, "key": "a", "obj": 3}], 80)[1].split() == ["a", "3"]


def test_an_unknown_table_or_column_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = {"err": "no table is named device; did you mean devices?"}
    answers = {"/statedb/dump/device": (404, err), "/statedb/changes/device": (404, err), **SHOW}
    with stub_agent(tmp_path, answers) as agent:
        for verb in ("show", "watch"):
            result = hive(capsys, "db", verb, "device", "-H", agent.socket)
            assert (result.code, result.out) == (1, "")
            assert result.err == "hive: no table is named device; did you mean devices?\n"
        wrong = hive(capsys, "db", "show", "devices", "--columns", "nam", "-H", agent.socket)
    assert wrong.err == "hive: there is no column nam; there are: ifindex, name, up, addresses, kind\n"


def change(key: int, obj: dict[str, Any], *, deleted: bool = False) -> dict[str, Any]:
    return {"rev": 1, "key": key, "obj": obj, "deleted": deleted}


CHANGES = [
    change(7, {"id": 7, "state": "regenerating", "labels": []}),
    change(7, {"id": 7, "state": "ready", "labels": ["a"]}),
    change(7, {"id": 7, "state": "ready", "labels": ["a"]}, deleted=True),
]


def test_watching_prints_inserts_updates_and_deletes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b"\n".join([*(json.dumps(one).encode() for one in CHANGES), b""])
    with stub_agent(tmp_path, {"/statedb/changes/endpoints": (200, body)}) as agent:
        result = hive(capsys, "db", "watch", "endpoints", "-H", agent.socket)
        as_json = hive(capsys, "db", "watch", "endpoints", "-o", "json", "-H", agent.socket)
    assert result.out.splitlines() == [
        "+ 7  id=7  state=regenerating",
        "~ 7  state: regenerating → ready  labels: none → a",
        "- 7",
    ]
    assert (result.code, result.err) == (
        1,
        f"hive: the agent at {agent.socket} has ended the answer: did it stop?\n",
    )
    assert [json.loads(line) for line in as_json.out.splitlines()] == CHANGES


def test_ctrl_c_ends_a_watch_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr("hive.agent.db.follow", interrupted)
    result = hive(capsys, "db", "watch", "endpoints", "-H", tmp_path / "x.sock")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_a_long_change_is_wrapped_on_a_terminal() -> None:
    lines = describe(change(7, {"id": 7, "labels": [f"label-{number}" for number in range(12)]}), {}, 60)
    assert max(map(len, map(click.unstyle, lines))) <= 60
    assert len(lines) > 1


def test_a_failing_table_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"err": "ZeroDivisionError: division by zero"}\n'
    with stub_agent(tmp_path, {"/statedb/changes/totals": (200, body)}) as agent:
        result = hive(capsys, "db", "watch", "totals", "-H", agent.socket)
    assert result.err == "hive: table totals cannot be read: ZeroDivisionError: division by zero\n"


def test_no_agent_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["list"], ["show", "x"], ["watch", "x"]):
        result = hive(capsys, "db", *arguments, "-H", tmp_path / "nobody.sock")
        assert (result.code, len(result.err.splitlines())) == (1, 1)
        assert "no agent answers" in result.err
