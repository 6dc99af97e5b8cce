"""The operator's two ports respond as Cilium's do."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection
from pathlib import Path

import anyio.to_thread
import pytest

from lifecycle import GraphError, Hive
from tests.integration.operator.recordings import load
from tests.support.counts import Count
from tests.support.operator import Operators
from tests.support.operator.running import POOL

pytestmark = pytest.mark.anyio
RECORDED = load("api_endpoints")["steps"][0]["http"]
METRICS_PAGE = Path(__file__).resolve().parents[3] / "docs" / "operate" / "metrics.md"
FAMILIES = next(
    one["prometheus_families"] for one in load("api_endpoints")["steps"] if "prometheus_families" in one
)
NOT_OURS = (
    "go_",
    "cilium_operator_doublewrite_",  # exposed in those modes
    "cilium_operator_ces_",  # exposed with slices
    "cilium_operator_number_of_ceps_per_ces",
    "cilium_operator_process_network_",
)


def address(hive: Hive, setting: str) -> str:
    return str(next(one.value for one in hive.settings() if one.option.name == setting))


async def test_both_ports_answer_with_the_recorded_status(operators: Operators, count: Count) -> None:
    def ask(where: str, method: str, path: str) -> tuple[int, str, str]:
        connection = HTTPConnection(where, timeout=30)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
        finally:
            connection.close()

    async with operators.running(
        {**POOL, "enable-metrics": "true", "enable-cilium-endpoint-slice": "true"}
    ) as hive:
        for one in RECORDED:
            where = address(hive, one["address"])
            status, kind, body = await anyio.to_thread.run_sync(ask, where, one["method"], one["path"])
            asked = (one["address"], one["method"], one["path"])
            assert status == one["status"], asked
            if not one["path"].strip("/").endswith("metrics") or status != 200:
                assert (kind, body) == (one["headers"]["Content-Type"], one["body"]), asked
        metrics = await anyio.to_thread.run_sync(
            ask, address(hive, "operator-prometheus-serve-addr"), "GET", "/metrics"
        )
        listed = await anyio.to_thread.run_sync(
            ask, address(hive, "operator-api-serve-addr"), "GET", "/v1/metrics"
        )
    names = [one["name"] for one in json.loads(listed[2])]
    assert names == sorted(names)
    exposed = set(re.findall(r"^# TYPE (\w+) (\w+)$", metrics[2], re.MULTILINE))
    recorded = {(one["name"], one["type"]) for one in FAMILIES if not one["name"].startswith(NOT_OURS)}
    assert recorded - exposed == set()
    documented = METRICS_PAGE.read_text()
    own = {name for name, _ in exposed if name.startswith("cilium_operator_")}
    assert {name for name in own if f"`{name}`" not in documented and "_process_" not in name} == set()
    count("metrics of the operator", {"told as recorded": len(recorded)})
    count("requests of the operator's ports", {"answered with the same status": len(RECORDED)})


async def test_only_get_is_allowed_below_v1(operators: Operators) -> None:
    def post(where: str) -> tuple[int, str | None, bytes]:
        connection = HTTPConnection(where, timeout=30)
        try:
            connection.request("POST", "/v1/metrics/?x=1")
            answer = connection.getresponse()
            return answer.status, answer.headers["Allow"], answer.read()
        finally:
            connection.close()

    async with operators.running(POOL) as hive:
        found = await anyio.to_thread.run_sync(post, address(hive, "operator-api-serve-addr"))
    assert found == (405, "GET", b'{"code":405,"message":"method POST is not allowed, but [GET] are"}')


async def test_operations_that_are_switched_off_are_refused(operators: Operators) -> None:
    def ask(where: str, path: str) -> tuple[int, str]:
        connection = HTTPConnection(where, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    values = {**POOL, "enable-cilium-operator-server-access": "GetHealthz GetM*"}
    async with operators.running(values) as hive:
        where = address(hive, "operator-api-serve-addr")
        found = {
            path: await anyio.to_thread.run_sync(ask, where, path)
            for path in ("/healthz", "/v1/metrics/", "/v1/cluster", "/hive/status")
        }
        assert {path: status for path, (status, _) in found.items()} == {
            "/healthz": 200,
            "/v1/metrics/": 200,
            "/v1/cluster": 403,
            "/hive/status": 200,
        }
        assert found["/v1/cluster"][1].startswith("This API is administratively disabled.")


async def test_an_unknown_operation_is_refused(operators: Operators) -> None:
    with pytest.raises(GraphError, match=r"'GetNothing': expected . or some of GetCluster"):
        async with operators.running({**POOL, "enable-cilium-operator-server-access": "GetNothing"}):
            pass
