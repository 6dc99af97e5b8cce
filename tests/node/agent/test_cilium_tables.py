"""``cilium-dbg statedb`` shows the node's real devices, routes, addresses and kernel settings."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from hive.client import connect
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import NODE_ADDRESS, Lab
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def query(pid: int, table: str) -> list[dict[str, Any]]:
    """Every row, asked for as Cilium's client does: a GET with a body, a line of JSON a row."""
    body = {"table": table, "index": "__revision__", "key": "AAAAAAAAAAA=", "lowerbound": True}
    with connect(api_socket(pid)) as stream:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = stream
        connection.request("GET", "/statedb/query", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        return [json.loads(line)["obj"] for line in answer.read().splitlines()]


def test_tables_show_the_node_as_it_is(node: Lab) -> None:
    pid = serving(node, "--kube-proxy-replacement=true")
    pod = pods.add(node, "a")
    eventually(lambda: any(row["NodePort"] for row in query(pid, "node-addresses")))
    devices = {row["Name"]: row for row in query(pid, "devices")}
    (selected,) = (row for row in devices.values() if row["Selected"])
    assert NODE_ADDRESS in {each["Addr"] for each in selected["Addrs"]}
    assert selected["NotSelectedReason"] == ""
    (link,) = (row for name, row in devices.items() if name.startswith("lxc"))
    assert (link["Type"], link["NotSelectedReason"]) == ("veth", 'has excluded prefix "lxc"')
    uses = [row for row in query(pid, "node-addresses") if row["DeviceName"] == selected["Name"]]
    assert [(row["Addr"], row["NodePort"], row["Primary"]) for row in uses] == [(NODE_ADDRESS, True, True)]
    routes = query(pid, "routes")
    host = devices["cilium_host"]["Index"]
    assert any(row["LinkIndex"] == host and row["Table"] == 254 for row in routes)
    settings = {".".join(row["Name"]): row for row in query(pid, "sysctl")}
    assert {row["Status"]["Kind"] for row in settings.values()} == {"done"}
    assert settings["net.ipv4.conf.cilium_host.forwarding"]["Val"] == "1"
    assert query(pid, "l2-announce") == []
    assert pod.ipv4
