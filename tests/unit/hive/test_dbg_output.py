"""``cilium-dbg -o yaml`` and ``-o jsonpath``: the forms of Go's libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.dbg.main import run
from tests.unit.conformance.replayed_agent import replaying


@pytest.mark.parametrize(
    ("words", "path", "body", "lines"),
    [
        (
            "service get 7",
            "service/7",
            {"status": {"realized": {"id": 7, "frontend-address": {"ip": "::1"}, "flags": {"type": "y"}}}},
            [
                "spec: null",
                "status:",
                "    realized:",
                "        backendaddresses: []",
                "        flags:",
                '            cluster: ""',
                '            exttrafficpolicy: ""',
                "            healthchecknodeport: 0",
                '            inttrafficpolicy: ""',
                '            name: ""',
                '            namespace: ""',
                '            natpolicy: ""',
                '            trafficpolicy: ""',
                '            type: "y"',
                "        frontendaddress:",
                "            ip: ::1",
                "            port: 0",
                '            protocol: ""',
                '            scope: ""',
                "        id: 7",
            ],
        ),
        (
            "identity list",
            "identity",
            [{"id": 9, "labels": ["k8s:app=web", "reserved:"]}, {"id": 1, "labels": None}],
            [
                "- id: 1",
                "  labels: []",
                '  labelssha256: ""',
                "- id: 9",
                "  labels:",
                "    - k8s:app=web",
                "    - 'reserved:'",
                '  labelssha256: ""',
            ],
        ),
        (
            "config -r",
            "config",
            {"status": {"daemonConfigurationMap": {"EnableIPv6": False, "Note": "a: b", "Name": "1.5"}}},
            ["EnableIPv6: false", 'Name: "1.5"', "Note: 'a: b'"],
        ),
        ("ip list", "ip", [], ["[]"]),
    ],
)  # fmt: skip
def test_yaml_has_all_fields_of_the_model_by_their_names_in_go(
    words: str,
    path: str,
    body: object,
    lines: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    request = {"method": "GET", "path": f"/v1/{path}"}
    exchange = {"request": request, "response": {"status": 200, "body": body}}
    with replaying(tmp_path / "cilium.sock", [exchange]):
        assert run([*words.split(), "-o", "yaml"]) == 0
    assert capfd.readouterr().out == "\n".join(lines) + "\n\n"


@pytest.mark.parametrize(
    ("path", "printed"),
    [
        ("{[*].labels}", '["reserved:host"] ["k8s:a=<b>","k8s:c"]\n'),
        ("{[0].id}", "1\n"),
        ("{range [*]}{.id}={.labels[0]};{end}", "1=reserved:host;9=k8s:a=<b>;\n"),
        ("{[0].nothing}", "\n"),
    ],
)
def test_jsonpath_prints_lists_as_compact_json(
    path: str,
    printed: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    body = [{"id": 1, "labels": ["reserved:host"]}, {"id": 9, "labels": ["k8s:a=<b>", "k8s:c"]}]
    request = {"method": "GET", "path": "/v1/identity"}
    exchange = {"request": request, "response": {"status": 200, "body": body}}
    with replaying(tmp_path / "cilium.sock", [exchange]):
        assert run(["identity", "list", "-o", f"jsonpath={path}"]) == 0
    assert capfd.readouterr().out == printed.replace('<b>",', '\\u003cb\\u003e",')
