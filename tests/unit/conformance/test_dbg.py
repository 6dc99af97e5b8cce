"""``cilium-dbg`` of ours against recordings of Cilium's: what it asks, what it prints, how it exits."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from hive.dbg.main import run
from tests.support.counts import Count, not_replayed
from tests.support.recordings import INDEX, recorded, recordings
from tests.unit.conformance.recordings import load
from tests.unit.conformance.replayed_agent import UNORDERED_TOO, lines_of, replaying

NEWER: Final = "of the client of 1.19, which asks and prints otherwise"
EXCLUDED: Final = {
    "monitor": "the monitor prints lines of its own: tests/unit/hive/test_monitor.py",
    "monitor_json": "the monitor prints lines of its own: tests/unit/hive/test_monitor.py",
    "status_verbose_with_health_ep_empty_table": "the recorded client crashes",
}
NAMES: Final = sorted(
    path.stem for path in recordings("dbg").glob("[!_]*.json") if "client1.19" not in path.stem
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXCLUDED])
def test_requests_output_and_exit_codes_are_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = load(f"dbg/{name}")
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    files = recording.get("files_before") or {}
    for path, text in files.items():
        (tmp_path / Path(path).name).write_text(text)
    places = {"unix:///var/run/cilium/cilium.sock": f"unix://{tmp_path}/cilium.sock"}
    places |= {path: str(tmp_path / Path(path).name) for path in files}
    health = (recording.get("health_socket_exchanges") or {}).get("exchanges")
    asked: list[tuple[str, str, Any]] = []
    with ExitStack() as running:
        if recording["agent"] == "running":
            asked = running.enter_context(replaying(tmp_path / "cilium.sock", recording["exchanges"]))
        if health:
            running.enter_context(replaying(tmp_path / "health.sock", health))
        code = run([places.get(word, word) for word in recording["argv"][1:]])
    out, err = capfd.readouterr()
    stdout = recording["stdout"]
    printed = stdout if isinstance(stdout, str) else json.dumps(stdout, indent=2)
    assert lines_of(out, name) == lines_of(printed, name)
    assert lines_of(err.replace(str(tmp_path), "/var/run/cilium"), name) == lines_of(
        recording.get("stderr", ""), name
    )
    assert code == recording["exit_code"]
    requests = [one["request"] for one in recording["exchanges"]]
    expected = [(one["method"], one["path"], one.get("body")) for one in requests]
    if name in UNORDERED_TOO:
        assert sorted(map(repr, asked)) == sorted(map(repr, expected))
    else:
        assert asked == expected


BGP: Final = {one["name"]: one for one in json.loads(recorded("bgp/cli-s17").read_text())}
NOT_AS_BGP: Final = {
    **dict.fromkeys(
        ("cli/bgp-peers-help", "cli/bgp-routes-help", "cli/bgp-rp-help"), "help has its own form"
    ),
    "cli/peers-many-sorting-4-twenty": "the client's order of many peers follows no rule",
    "cli/routes-sorting-2-advertised": "the client's order of many routes follows no rule",
    "cli/routes-sorting-3-twenty": "the client's order of many routes follows no rule",
    "cli/peers-bad-output": "a wrong form is refused before the agent is asked",
    "cli/peers-no-agent": "the recorded socket has another name",
    "cli/peers-yaml": "YAML has the keys of JSON",
    "cli/routes-peer-bad": "a wrong address is refused in Python's words",
}


@pytest.mark.parametrize("name", [name for name in BGP if name not in NOT_AS_BGP])
def test_bgp_is_printed_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = BGP[name]
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    exchanges = [
        {"request": request, "response": {"status": answer["status"], **_body(answer["body"])}}
        for request, answer in zip(recording["requests"], recording["answers"], strict=False)
    ]
    with replaying(tmp_path / "cilium.sock", exchanges) as asked:
        code = run(recording["args"])
    out, err = capfd.readouterr()
    assert lines_of(out, name) == lines_of(recording["stdout"], name)
    assert lines_of(err, name) == lines_of(recording["stderr"], name)
    assert code == recording["exit"]
    assert [one[:2] for one in asked] == [(one["method"], one["path"]) for one in recording["requests"]]


@pytest.mark.parametrize(
    ("table", "row", "printed"),
    [
        ("l2-announce", {"IP": "192.0.2.1", "NetworkInterface": "eth0"}, "192.0.2.1   eth0"),
        (
            "sysctl",
            {"Name": ["net", "ipv4", "ip_forward"], "Val": "1", "Status": {"Kind": "done"}},
            "net.ipv4.ip_forward   1       done (never)",
        ),
    ],
)
def test_tables_without_a_recording_have_the_columns_of_cilium_s(
    table: str,
    row: dict[str, Any],
    printed: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    request = {"method": "GET", "path": "/statedb/query"}
    answer = {"status": 200, "body_text": json.dumps({"rev": 1, "obj": row}) + "\n"}
    with replaying(tmp_path / "cilium.sock", [{"request": request, "response": answer}]):
        assert run(["statedb", table]) == 0
    assert capfd.readouterr().out.splitlines()[1] == printed


def _body(body: Any) -> dict[str, Any]:
    return {"body_text": body} if isinstance(body, str) else {"body": body}


def test_every_recording_is_replayed_or_has_a_reason_not_to_be(count: Count) -> None:
    index = json.loads(INDEX.read_text())
    recorded = {Path(row["file"]).stem for row in index["dbg"]}
    newer = {name for name in recorded if "client1.19" in name}
    assert recorded - newer <= set(NAMES)
    reasons = [*EXCLUDED.values(), *([NEWER] * len(newer))]
    replayed = len(NAMES) - len(EXCLUDED)
    count("recordings of cilium-dbg", {"replayed": replayed, **not_replayed(reasons)})
    replayed = len(BGP) - len(NOT_AS_BGP)
    count("recordings of cilium-dbg bgp", {"replayed": replayed, **not_replayed(NOT_AS_BGP.values())})
