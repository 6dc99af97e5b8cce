"""``cilium-dbg config`` and ``endpoint config``: how options are printed, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.dbg.main import run
from tests.unit.conformance.replayed_agent import replaying

CONFIG: dict[str, Any] = {
    "spec": {"options": {"Debug": "Disabled"}},
    "status": {
        "daemonConfigurationMap": {
            "EnableIPv6": False,
            "Options": {"EnableX": True, "Level": 1, "Name": "off", "Mode": "tunnel"},
        },
        "immutable": {"ConntrackLocal": "true"},
        "k8s-endpoint": "https://192.0.2.1:6443",
        "realized": {
            "options": {"Debug": "Disabled", "MonitorAggregationLevel": "Medium", "PolicyTracing": "1"},
            "policy-enforcement": "default",
        },
    },
}


def configured(
    words: str, directory: Path, monkeypatch: pytest.MonkeyPatch, body: Any = CONFIG
) -> tuple[int, list[Any]]:
    """The exit code, and the bodies of changes."""
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{directory}/cilium.sock")
    path = "/v1/endpoint/7/config" if words.startswith("endpoint") else "/v1/config"
    get = {"request": {"method": "GET", "path": path}, "response": {"status": 200, "body": body}}
    patch = {"request": {"method": "PATCH", "path": path}, "response": {"status": 200, "body": {}}}
    with replaying(directory / "cilium.sock", [get, get, patch]) as asked:
        code = run(words.split())
    return code, [body for method, _, body in asked if method == "PATCH"]


def test_options_that_can_be_read_as_booleans_are_enabled_or_disabled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configured("config -a", tmp_path, monkeypatch) == (0, [])
    assert capfd.readouterr().out.splitlines() == [
        "#### Read-only configurations ####",
        f"{'EnableIPv6':<34}: false",
        "Options",
        f"\t{'EnableX':<26}: Enabled",
        f"\t{'Level':<26}: Enabled",
        f"\t{'Mode':<26}: tunnel",
        f"\t{'Name':<26}: Disabled",
        f"{'k8s-configuration':<34}: ",
        f"{'k8s-endpoint':<34}: https://192.0.2.1:6443",
        f"{'ConntrackLocal':<34}: Enabled",
        "##### Read-write configurations #####",
        f"{'Debug':<34}: Disabled",
        f"{'MonitorAggregationLevel':<34}: Medium",
        f"{'PolicyTracing':<34}: Enabled",
        f"{'PolicyEnforcement':<34}: default",
    ]


@pytest.mark.parametrize(
    ("words", "out", "err"),
    [
        ("config Debug", "", "Error: Improper configuration format provided\n"),
        ("config Nope=true", 'unknown option "Nope"\n', ""),
        ("config Debug=maybe", "invalid option value maybe\n", ""),
        ("config !Debug=true", "invalid boolean format\n", ""),
        ("config MonitorAggregationLevel=most", 'invalid monitor aggregation level "most"\n', ""),
        ("config policyenforcement=always", 'unknown option "policyenforcement"\n', ""),
        ("endpoint config 7 Debug", "", "Error: Cannot parse option Debug: invalid option format\n"),
        ("endpoint config 7 Debug=2", "", "Error: Cannot parse option Debug=2: invalid option value 2\n"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_in_cilium_s_words(
    words: str,
    out: str,
    err: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert configured(words, tmp_path, monkeypatch) == (1, [])
    assert capfd.readouterr() == (out, err)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("config debug=on", {"Debug": "Enabled"}),
        ("config MonitorAggregationLevel=max", {"Debug": "Disabled", "MonitorAggregationLevel": "max"}),
        ("endpoint config 7 Debug=on", {"Debug": "1"}),
        ("endpoint config 7 MonitorAggregationLevel=low", {"MonitorAggregationLevel": "2"}),
    ],
)  # fmt: skip
def test_options_are_sent_as_cilium_sends_them(
    words: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"realized": {"options": {"Debug": "Disabled", "MonitorAggregationLevel": "None"}}}
    code, changes = configured(words, tmp_path, monkeypatch, body if words.startswith("endpoint") else CONFIG)
    assert code == 0
    (sent,) = changes
    assert {name: sent["options"][name] for name in options} == options
