"""Our ``cilium-dbg`` against recordings of Cilium's: requests, output, exit codes."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from base64 import b64encode
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import pytest

from hive.dbg.main import run
from tests.support.counts import Count, not_replayed
from tests.support.recordings import INDEX, recorded, recordings
from tests.unit.conformance.recordings import load
from tests.unit.conformance.replayed_agent import UNORDERED_TOO, lines_of, replaying

NEWER: Final = "of the 1.19 client, whose requests and output differ"
ELSEWHERE: Final = {"monitor", "monitor_json"}
"""Recordings with a socket of their own: tests/unit/hive/test_dbg_monitor.py."""
EXCLUDED: Final = {
    "status_verbose_with_health_ep_empty_table": "the recorded client crashes",
}
NAMES: Final = sorted(
    path.stem for path in recordings("dbg").glob("[!_]*.json") if "client1.19" not in path.stem
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*EXCLUDED, *ELSEWHERE}])
def test_requests_output_and_exit_codes_are_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = load(f"dbg/{name}")
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    monkeypatch.setattr("hive.dbg.requests.DEFAULT_SOCKET", tmp_path / "cilium.sock")
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
    assert err.replace(str(tmp_path), "/var/run/cilium") == recording.get("stderr", "")
    assert code == recording["exit_code"]
    requests = [one["request"] for one in recording["exchanges"]]
    expected = [(one["method"], one["path"], one.get("body")) for one in requests]
    if name in UNORDERED_TOO:
        assert sorted(map(repr, asked)) == sorted(map(repr, expected))
    else:
        assert asked == expected


@pytest.mark.parametrize("name", sorted(path.stem for path in recordings("clustermesh").glob("dbg_*.json")))
def test_remote_clusters_are_printed_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = load(f"clustermesh/{name}")
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    with replaying(tmp_path / "cilium.sock", recording["exchanges"]):
        assert run(recording["argv"][1:]) == recording["exit_code"]
    out, err = capfd.readouterr()
    assert lines_of(out, name) == lines_of(recording["stdout"], name)
    assert err == recording["stderr"]


@pytest.mark.parametrize("name", sorted(path.stem for path in recordings("wireguard").glob("dbg_*.json")))
def test_the_state_of_wireguard_is_printed_as_recorded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = load(f"wireguard/{name}")
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    with replaying(tmp_path / "cilium.sock", recording["exchanges"]):
        code = run(recording["argv"][1:])
    out, err = capfd.readouterr()
    if "crash" in recording:
        assert "Traceback" not in err
        return
    assert lines_of(out, name) == lines_of(recording["stdout"], name)
    assert err == recording["stderr"]
    assert code == recording["exit_code"]


def test_preferred_backends_of_global_services_are_marked_when_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    backends: list[dict[str, Any]] = [
        {"ip": ip, "port": 80, "state": "active"} for ip in ("10.1.0.5", "10.2.0.5")
    ]
    backends[0]["preferred"] = True
    spec = {
        "id": 1,
        "frontend-address": {"ip": "10.96.0.1", "port": 80},
        "flags": {"type": "ClusterIP"},
        "backend-addresses": backends,
    }
    exchange = {
        "request": {"method": "GET", "path": "/v1/service"},
        "response": {"status": 200, "body": [{"spec": spec, "status": {"realized": spec}}]},
    }
    with replaying(tmp_path / "cilium.sock", [exchange, exchange]):
        assert run(["service", "list"]) == 0
        assert "preferred" not in capfd.readouterr().out
        assert run(["service", "list", "--clustermesh-affinity"]) == 0
    _, first, second = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert first == ["1", "10.96.0.1:80", "ClusterIP", "1", "=>", "10.1.0.5:80", "(active)", "(preferred)"]
    assert second == ["2", "=>", "10.2.0.5:80", "(active)"]


@pytest.mark.parametrize(
    ("words", "path", "body", "reason"),
    [
        ("endpoint list", "endpoint", [{"id": 7, "status": {"networking": "none"}}], "$[0].status"),
        ("ip list -n", "ip", [{"cidr": "10.0.0.1/32", "identity": 1, "metadata": "k8s"}], "$[0].metadata"),
        ("status", "healthz", {"kubernetes": "fine"}, "$.kubernetes"),
        ("service list", "service", [{"status": {"realized": {"id": 1, "frontend-address": 80}}}], "$[0]"),
        ("node list", "cluster/nodes", {"nodes-added": [{"name": "a", "primary-address": 1}]}, "nodes-added"),
    ],
)  # fmt: skip
def test_answers_with_fields_of_other_types_end_in_one_line(
    words: str,
    path: str,
    body: object,
    reason: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    exchange = {
        "request": {"method": "GET", "path": f"/v1/{path}"},
        "response": {"status": 200, "body": body},
    }
    with replaying(tmp_path / "cilium.sock", [exchange]):
        assert run(words.split()) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"Error: [GET /{path}] json: cannot unmarshal the answer: ")
    assert reason in line


def test_an_empty_cidr_is_listed_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    body = [{"cidr": "10.0.0.0/8", "identity": 2}, {"cidr": "", "identity": 1}]
    exchange = {"request": {"method": "GET", "path": "/v1/ip"}, "response": {"status": 200, "body": body}}
    with replaying(tmp_path / "cilium.sock", [exchange]):
        assert run(["ip", "list", "-n"]) == 0
    assert [line.split() for line in capfd.readouterr().out.splitlines()[1:]] == [["1"], ["10.0.0.0/8", "2"]]


def test_a_backend_weight_without_digits_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    words = "service update --id 1 --frontend 10.0.0.1:80 --backends 10.0.0.2:80 --backend-weights a"
    assert run(words.split()) == 1
    assert capfd.readouterr().err.startswith('Error: invalid argument "a" for "--backend-weights" flag: ')


BGP: Final = {one["name"]: one for one in json.loads(recorded("bgp/cli-s17").read_text())}
NOT_AS_BGP: Final = {
    **dict.fromkeys(
        ("cli/bgp-peers-help", "cli/bgp-routes-help", "cli/bgp-rp-help"), "the help has another format"
    ),
    "cli/peers-many-sorting-4-twenty": "Go's sort.Slice is unstable above twelve peers",
    "cli/routes-sorting-2-advertised": "Go's sort.Slice is unstable above twelve routes",
    "cli/routes-sorting-3-twenty": "Go's sort.Slice is unstable above twelve routes",
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
    with ExitStack() as running:
        asked: list[tuple[str, str, Any]] = []
        if exchanges:
            asked = running.enter_context(replaying(tmp_path / "cilium.sock", exchanges))
        code = run(recording["args"])
    out, err = capfd.readouterr()
    assert lines_of(out, name) == lines_of(recording["stdout"], name)
    assert lines_of(err.replace(f"{tmp_path}/cilium.sock", "/nonexistent.sock"), name) == lines_of(
        recording["stderr"], name
    )
    assert code == recording["exit"]
    assert [one[:2] for one in asked] == [(one["method"], one["path"]) for one in recording["requests"]]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.0.0", "IPv4 address too short"),
        ("10.0.0.1.2", "IPv4 address too long"),
        ("10.01.0.1", "IPv4 field has octet with leading zero"),
        ("10..0.1", 'IPv4 field must have at least one digit (at ".0.1")'),
        ("10.0.0.1/32", 'unexpected character (at "/32")'),
        ("peer", "unable to parse IP"),
    ],
)
def test_wrong_addresses_of_peers_are_refused_in_the_words_of_go(
    address: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["bgp", "routes", "advertised", "ipv4", "unicast", "peer", address]) == 1
    assert f'invalid peer IP address: ParseAddr("{address}"): {reason}\n' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        ("400100", "type 1"),  # no origin
        ("4001020000", "type 1"),
        ("4001", "attribute type length is short"),
        ("400103", "type 1"),  # shorter than its length
        ("5001", "attribute type length is short"),
        ("50010000", "type 1"),
        ("40020302010000", "type 2"),  # half an AS
        ("40020202ff", "type 2"),
        ("400303c00002", "type 3"),
        ("80040100", "type 4"),
        ("c00803ff0000", "type 8"),
        ("800e020001", "type 14"),
        ("800e0500010100ff", "type 14"),
        ("800e0a00010104c000020100ff", "type 14"),
        ("c020050000000000", "type 32"),
    ],
)
def test_malformed_attributes_of_routes_end_the_command_in_one_line(
    attribute: str,
    what: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    err = _routes_with("GAoAAQ==", b64encode(bytes.fromhex(attribute)).decode(), tmp_path, capfd, monkeypatch)
    assert what in err


@pytest.mark.parametrize("prefix", ["GAo=", "IQoAAAEA", "!", "GA=", ""])
def test_malformed_prefixes_of_routes_end_the_command_in_one_line(
    prefix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    err = _routes_with(prefix, "QAEBAA==", tmp_path, capfd, monkeypatch)
    assert "NLRI" in err


def _routes_with(
    prefix: str,
    attribute: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What is printed to stderr of a route that cannot be read."""
    path = {
        "age-nanoseconds": 1,
        "best": True,
        "family": {"afi": "ipv4", "safi": "unicast"},
        "nlri": {"base64": prefix},
        "path-attributes": [{"base64": attribute}],
    }
    request = {"method": "GET", "path": "/v1/bgp/routes?afi=ipv4&safi=unicast&table_type=loc-rib"}
    answer = {
        "status": 200,
        **_body(json.dumps([{"prefix": "10.0.1.0/24", "router-asn": 1, "paths": [path]}])),
    }
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    with replaying(tmp_path / "cilium.sock", [{"request": request, "response": answer}]):
        assert run(["bgp", "routes", "available", "ipv4", "unicast"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("Error: failed to decode API route: failed to deserialize Paths: ")
    return err


@pytest.mark.parametrize(
    "name", ["status_verbose", "service_get", "version_json", "encrypt_status_wireguard"]
)
def test_a_null_is_printed_as_an_absent_field_is(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    texts = []
    for change in (_without_leaves, _with_null_leaves):
        recording = deepcopy(load(f"dbg/{name}"))
        for one in recording["exchanges"]:
            if "body" in one["response"]:
                one["response"]["body"] = change(one["response"]["body"])
        with replaying(tmp_path / "cilium.sock", recording["exchanges"]):
            code = run(recording["argv"][1:])
        texts.append((code, *capfd.readouterr()))
    assert texts[0] == texts[1]


def _without_leaves(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_leaves(one) for key, one in value.items() if isinstance(one, dict | list)}
    return [_without_leaves(one) for one in value] if isinstance(value, list) else value


def _with_null_leaves(value: Any) -> Any:
    if isinstance(value, dict):
        nulls = {key: None for key, one in value.items() if not isinstance(one, dict | list)}
        return nulls | {key: _with_null_leaves(one) for key, one in value.items() if key not in nulls}
    return [_with_null_leaves(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("module", ["hive.main", "hive.dbg.main", "hive.dbg.health"])
def test_a_command_exits_0_when_the_reader_closes_the_pipe(module: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", f"from {module} import main; main()", "--help"],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_agent_that_hangs_up_is_reported_as_by_go(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")

    class ReadsAndCloses(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)

    with socketserver.UnixStreamServer(f"{tmp_path}/cilium.sock", ReadsAndCloses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert run(["status"]) == 1
        thread.join()
    assert capfd.readouterr().err.strip() == 'Get "http://localhost/v1/healthz": EOF'


NOT_AN_OBJECT: Final = "json: cannot unmarshal number where an object is expected"


@pytest.mark.parametrize(
    ("command", "answer", "line"),
    [
        ("status", "7", NOT_AN_OBJECT),
        ("lrp list", "{}", "Cannot get lrp list: json: cannot unmarshal object where an array is expected"),
        (
            "map events x",
            "<html>",
            "could not get map name events: Expecting value: line 1 column 1 (char 0)",
        ),
        ("statedb devices", "7", f"LowerBound: {NOT_AN_OBJECT}"),
    ],
)
def test_an_answer_of_another_kind_is_one_line(
    command: str,
    answer: str,
    line: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    paths = ("/v1/healthz", "/v1/lrp", "/v1/map/x/events?follow=false", "/statedb/query")
    exchanges = [
        {"request": {"method": "GET", "path": path}, "response": {"status": 200, "body_text": answer}}
        for path in paths
    ]
    with replaying(tmp_path / "cilium.sock", exchanges):
        assert run(command.split()) == 1
    assert capfd.readouterr().err.strip().removeprefix("Error: ") == line


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
