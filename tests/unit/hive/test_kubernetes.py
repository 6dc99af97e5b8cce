"""``hive kubernetes status``: output and errors."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import hive
from tests.unit.hive.stub_agent import stub_agent


def rows(*objects: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"rev": 1, "key": number, "obj": one} for number, one in enumerate(objects)]


def kind(name: str, state: str, **more: Any) -> dict[str, Any]:
    return {"kind": name, "state": state, "objects": 3, "synced": True, "changed": 0.0} | more


def answers(kinds: list[dict[str, Any]], files: list[dict[str, Any]]) -> dict[str, Any]:
    server = {"state": "Ok", "msg": "1.36 (v1.36.2) [linux/amd64]", "k8s-api-versions": ["core/v1::Pods"]}
    return {
        "/v1/healthz": (200, {"kubernetes": server}),
        "/statedb/dump/k8s-sources": (200, {"k8s-sources": rows(*kinds)}),
        "/statedb/dump/manifests": (200, {"manifests": rows(*files)}),
    }


def test_kubernetes_status_shows_the_state_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [
        kind("pods", "watching", changed=time.time() - 130, broken=["pods/a/b: spec: no"]),
        kind("nodes", "failing", synced=False, error="no answer"),
        kind("ciliumnodes.cilium.io", "absent"),
    ]
    with stub_agent(tmp_path, answers(kinds, [])) as agent:
        result = hive(capsys, "kubernetes", "status", "-H", agent.socket)
        as_json = hive(capsys, "kubernetes", "status", "-H", agent.socket, "-o", "json")
    first, *lines = result.out.splitlines()
    assert first == "API server: Ok 1.36 (v1.36.2) [linux/amd64]"
    assert [line.split() for line in lines[1:]] == [
        ["ciliumnodes.cilium.io", "absent", "3", "never"],
        ["nodes", "failing,", "not", "synced", "3", "never", "no", "answer"],
        ["pods", "watching", "3", "2m", "ago", "pods/a/b:", "spec:", "no"],
    ]
    assert json.loads(as_json.out)["kinds"] == kinds


def test_kubernetes_status_lists_broken_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [{"name": "a.yaml", "objects": 1, "error": "/m/a.yaml:1:2: no"}, {"name": "b.yaml", "objects": 2}]
    files.append({"name": "c.yaml", "objects": 0, "left_out": "/m/c.yaml:3:4: X is not known"})
    with stub_agent(tmp_path, answers([kind("pods", "synced")], files)) as agent:
        result = hive(capsys, "kubernetes", "status", "-H", agent.socket)
    assert result.out.splitlines()[0] == "manifests: 3 files, 1 with errors"
    assert result.out.splitlines()[-2:] == ["/m/a.yaml:1:2: no", "left out: /m/c.yaml:3:4: X is not known"]


def test_an_agent_without_a_source_prints_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, answers([], [])) as agent:
        result = hive(capsys, "kubernetes", "status", "-H", agent.socket)
    assert result.out.startswith("no source")
