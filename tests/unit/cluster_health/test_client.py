"""Our ``cilium-health`` against recordings of Cilium's: requests, output, exit codes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from hive.dbg.health import run
from tests.unit.cluster_health.recorded import DATA, recording
from tests.unit.conformance.replayed_agent import replaying

EXCLUDED: Final = {
    **dict.fromkeys(
        ("get_without_load", "status_node_null_plain", "status_node_null_succinct"),
        "the recorded client crashes",
    ),
    "no_args": "the help has another format",
    "status_not_json": "the recorded message is that of Go's JSON parser",
}
NAMES: Final = sorted(path.stem.removeprefix("client_") for path in DATA.glob("client_*.json"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXCLUDED])
def test_requests_output_and_exit_codes_are_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = recording(f"client_{name}")
    socket = tmp_path / "health.sock"
    monkeypatch.delenv("CILIUM_HEALTH_SOCK", raising=False)
    if name == "default_socket":
        monkeypatch.setattr("hive.dbg.health.SOCKET", socket)
    for key, value in recorded["env"].items():
        monkeypatch.setenv(key, value.replace("<SOCK>", str(socket)))
    asked: list[tuple[str, str, Any]] = []
    with ExitStack() as running:
        if recorded["exchanges"]:
            asked = running.enter_context(replaying(socket, recorded["exchanges"]))
        code = run([word.replace("<SOCK>", str(socket)) for word in recorded["argv"][1:]])
    out, err = capfd.readouterr()
    place = "/var/run/cilium/health.sock" if name == "default_socket" else "<SOCK>"
    assert out == recorded["stdout"]
    assert err.replace(str(socket), place) == recorded["stderr"]
    assert code == recorded["exit_code"]
    requests = [one["request"] for one in recorded["exchanges"]]
    assert asked == [(one["method"], one["path"], None) for one in requests]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"local": "n1"}, "$.local"),
        ({"local": {"name": "a"}, "nodes": [{"name": "a", "host": {"primary-address": {"ip": 5}}}]}, "ip"),
        ({"local": {"name": "a"}, "nodes": [{}]}, "$.nodes[0]"),
    ],
)
def test_answers_with_fields_of_other_types_end_in_one_line(
    body: object,
    reason: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    socket = tmp_path / "health.sock"
    monkeypatch.setenv("CILIUM_HEALTH_SOCK", str(socket))
    exchange = {
        "request": {"method": "GET", "path": "/v1beta/status"},
        "response": {"status": 200, "body": body},
    }
    with replaying(socket, [exchange]):
        assert run(["status"]) == 1
    (line, _) = capfd.readouterr().err.split("\n", 1)
    assert line.startswith("Error: Cannot get status: json: cannot unmarshal the answer: ")
    assert reason in line
