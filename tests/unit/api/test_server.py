"""The API server itself: write permissions, unknown paths, and the socket file's lifetime."""

from __future__ import annotations

import json
import os
import socket
import stat
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cells.api.openapi import DESCRIBED
from cells.api.server import BY_PLUGINS, READ_ONLY, may_change
from cells.api.wire import READING
from cells.services import Frontend, FrontendKey, ServiceAddress, ServiceName, ServiceType
from cells.services.control import ServedFrontend
from cells.services.control.manual import ManualServices
from cells.services.control.tables import served_frontends
from lifecycle import StartError, Table, replace
from lifecycle.testing import fake
from tests.unit.api.node import running_node
from tests.unit.api.pods import added

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v1/nothing", 404, {"code": 404, "message": "path /v1/nothing was not found"}),
        ("GET", "/v1/a%2Fb", 404, {"code": 404, "message": "path /v1/a%2Fb was not found"}),
        (
            "PUT",
            "/v1/config",
            405,
            {"code": 405, "message": "method PUT is not allowed, but [GET,PATCH] are"},
        ),
        (
            "PATCH",
            "/v1/endpoint/1",
            405,
            {"code": 405, "message": "method PATCH is not allowed, but [DELETE,GET,PUT] are"},
        ),
        (
            "PUT",
            "/v1/endpoint/1/labels",
            405,
            {"code": 405, "message": "method PUT is not allowed, but [GET,PATCH] are"},
        ),
    ],
)
async def test_an_unknown_path_gets_a_problem_of_the_framework(
    method: str, path: str, status: int, body: dict[str, object], tmp_path: Path
) -> None:
    async with running_node(tmp_path) as node:
        got = await node.ask(method, path)
    assert (got.status, got.body, got.headers["Content-Type"]) == (status, body, "application/json")


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (None, {}, 422, 602),
        ({}, {}, 422, 602),
        (b"{", {}, 400, 400),
        (b'{"state":"ready"}', {"Content-Type": "text/plain"}, 415, 415),
        (b'{"state":"' + b"x" * (1 << 20) + b'"}', {}, 413, 413),
    ],
)
async def test_a_body_the_framework_refuses(
    body: object, headers: dict[str, str], status: int, code: int, tmp_path: Path
) -> None:
    async with running_node(tmp_path) as node:
        got = await node.ask("PUT", "/v1/endpoint/cilium-local:0", body, headers=headers)
    assert (got.status, got.body["code"]) == (status, code)


async def test_a_handler_that_fails_is_answered_and_logged(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        node.endpoints.all = None  # type: ignore[method-assign,assignment]
        got = await node.ask("GET", "/v1/endpoint")
    assert (got.status, got.raw) == (500, b"Internal error occurred, check Cilium logs for details.")


def test_only_root_and_the_agents_own_user_may_change_the_node() -> None:
    assert may_change(0)
    assert may_change(os.geteuid())
    assert not may_change(65534)


async def test_others_may_look_but_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.api.server.may_change", lambda _: False)
    async with running_node(tmp_path) as node:
        for method, path in (
            ("PUT", "/v1/endpoint/cilium-local:0"),
            ("DELETE", "/v1/endpoint"),
            ("DELETE", "/v1/endpoint/1"),
            ("PATCH", "/v1/config"),
            ("POST", "/v1/ipam"),
            ("POST", "/v1/ipam/10.0.1.9"),
            ("DELETE", "/v1/ipam/10.0.1.9"),
        ):
            got = await node.ask(method, path, {})
            assert got.status == 403
            assert f"the caller has uid {os.getuid()}" in got.raw.decode()
        assert node.given() == set()
        assert (await node.ask("GET", "/v1/config")).status == 200


async def test_changes_by_people_have_a_line_in_the_log(tmp_path: Path) -> None:
    spec = {"options": {"Debug": "Disabled"}, "policy-enforcement": "default"}
    with capture_logs() as logged:
        async with running_node(tmp_path) as node:
            assert (await node.ask("PATCH", "/v1/config", spec)).status == 200
            assert (await node.ask("PATCH", "/v1/config", {"options": {"Nope": "1"}})).status == 400
            assert (await node.ask("GET", "/v1/config")).status == 200
            assert (await node.ask("POST", "/v1/ipam", {})).status < 300
    (line,) = [one for one in logged if one["event"] == "changed through the API"]
    assert json.loads(line["body"]) == spec
    assert {name: line[name] for name in ("log_level", "method", "path", "uid", "pid")} == {
        "log_level": "info",
        "method": "PATCH",
        "path": "/v1/config",
        "uid": os.geteuid(),
        "pid": os.getpid(),
    }


CHANGES: dict[tuple[str, str], tuple[str, object, str, str]] = {
    ("PATCH", "/v1/config"): ("/v1/config", {"policy-enforcement": "always"}, '"default"', '"always"'),
    ("PATCH", "/v1/endpoint/{id}/config"): (
        "/v1/endpoint/1/config",
        {"options": {"SourceIPVerification": "0"}},
        '"Enabled"',
        '"Disabled"',
    ),
    ("PATCH", "/v1/endpoint/{id}/labels"): (
        "/v1/endpoint/1/labels",
        {"user": ["k8s:tier=front"]},
        "",
        "k8s:tier=front",
    ),
    ("PUT", "/v1/service/{id}"): (
        "/v1/service/7",
        {"id": 7, "frontend-address": {"ip": "198.51.100.7", "port": 80}, "flags": {"type": "ClusterIP"}},
        "",
        "198.51.100.7",
    ),
    ("DELETE", "/v1/service/{id}"): ("/v1/service/7", None, "198.51.100.7", ""),
    ("DELETE", "/v1/fqdn/cache"): ("/v1/fqdn/cache?matchpattern=a.example", None, "", ""),
    ("DELETE", "/v1/endpoint/{id}"): ("/v1/endpoint/1", None, "default/web-0", ""),
}
"""By route: what is asked, and what is in the line of before and now; empty where there is nothing."""
REFUSED = {
    ("PATCH", "/v1/prefilter"),
    ("DELETE", "/v1/prefilter"),
    ("PUT", "/v1/recorder/{id}"),
    ("DELETE", "/v1/recorder/{id}"),
    ("PUT", "/v1/policy"),
    ("DELETE", "/v1/policy"),
}


async def test_every_change_by_people_has_one_line_with_what_was_and_what_is_now(tmp_path: Path) -> None:
    changing = {(one.method, one.path) for one in DESCRIBED if one.method not in READING}
    assert changing == CHANGES.keys() | REFUSED | BY_PLUGINS | READ_ONLY
    served = served_frontends()
    key = FrontendKey(ServiceAddress(IPv4Address("198.51.100.7"), 80, 6))

    async def put(_requested: object) -> bool:
        with served.txn() as rows:
            rows.put(ServedFrontend(7, Frontend(key, ServiceType.CLUSTER_IP, ServiceName("shop", "web"))))
        return True

    async def delete(_number: int) -> bool:
        with served.txn() as rows:
            rows.delete(key)
        return True

    more = [
        replace(Table[FrontendKey, ServedFrontend], served),
        replace(ManualServices, fake(ManualServices, check_followed=lambda: None, put=put, delete=delete)),
    ]
    async with running_node(tmp_path, more=more) as node:
        await added(node)

        async def lines(method: str, path: str, body: object) -> tuple[int, list[Any]]:
            with capture_logs() as logged:
                got = await node.ask(method, path, body)
            return got.status, [one for one in logged if one["event"] == "changed through the API"]

        for (method, _), (path, body, was, now) in CHANGES.items():
            status, (line,) = await lines(method, path, body)
            assert (line["method"], line["path"], line["status"]) == (method, path, status)
            assert (status < 300, line["uid"], line["pid"]) == (True, os.geteuid(), os.getpid())
            assert json.loads(line["body"] or "null") == body
            assert (was in line["old"], was in line["new"]) == (True, not was), line
            assert (now in line["new"], now in line["old"]) == (True, not now), line
        for method, path in sorted(REFUSED):
            status, found = await lines(method, path.replace("{id}", "1"), [] if "policy" in path else {})
            assert (status >= 400, found) == (True, []), path
        assert (await lines("POST", "/hive/policy/trial", {"objects": [], "flows": []}))[1] == []


async def test_a_change_that_is_answered_with_an_error_has_a_line_too(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        await added(node)
        node.kernel.fault = OSError(12, "no memory")
        with capture_logs() as logged:
            asked = {"options": {"SourceIPVerification": "0"}}
            assert (await node.ask("PATCH", "/v1/endpoint/1/config", asked)).status == 500
            node.kernel.fault = None
    (line,) = [one for one in logged if one["event"] == "changed through the API"]
    assert line["status"] == 500
    assert ('"Enabled"' in line["old"], '"Disabled"' in line["new"]) == (True, True)


async def test_the_socket_is_there_while_the_hive_runs(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o660
    assert not node.socket.exists()


async def test_a_client_that_stays_connected_does_not_hold_up_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.api.server.SHUTDOWN_SECONDS", 3600.0)
    with socket.socket(socket.AF_UNIX) as idle:
        async with running_node(tmp_path) as node:
            idle.connect(str(node.socket))
            assert (await node.ask("GET", "/v1/config")).status == 200


async def test_a_second_agent_does_not_take_the_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "cilium.sock"))
        other.listen()
        with pytest.raises(StartError, match="another process serves"):
            async with running_node(tmp_path):
                pass
        assert (tmp_path / "cilium.sock").exists()
