"""Drops as Kubernetes Events: which are reported, their text, and their rate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from cells.config import AgentConfig
from cells.hubble.enums import DropReason, FlowVerdict, IPVersion, TrafficDirection
from cells.hubble.export.drop_events import DropEvents, DropEventSettings, drop_note
from cells.hubble.flow import IP, TCP, UDP, Flow, FlowEndpoint, ICMPv4, Layer4
from cells.hubble.hubble import Hubble
from cells.hubble.observer import FlowObserver
from cells.hubble.parser import FlowOrigin, Parser
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.objects.core import Pod
from cells.kubernetes.objects.kind import Meta
from lifecycle import Hive, Table, config, invoke, module, provide, replace, supply
from lifecycle.testing import eventually, fake
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.apiserver.errors import Resource

WEB = FlowEndpoint(namespace="default", pod_name="web-1", identity=30001)
DB = FlowEndpoint(namespace="default", pod_name="db-1", identity=30002)
WORLD = FlowEndpoint(identity=2, labels=["reserved:world"])
PREFIX = FlowEndpoint(identity=1 << 24 | 1)
HTTP = Layer4(TCP=TCP(destination_port=80))


def drop(source: FlowEndpoint, destination: FlowEndpoint, l4: Layer4 | None = HTTP, **more: Any) -> Flow:
    fields = {
        "verdict": FlowVerdict.DROPPED,
        "drop_reason_desc": DropReason.POLICY_DENIED,
        "traffic_direction": TrafficDirection.INGRESS,
        "IP": IP(source="10.0.0.1", destination="10.0.0.2", ipVersion=IPVersion.IPv4),
        "source": source,
        "destination": destination,
        "l4": l4,
    }
    return Flow(**{**fields, **more})


def test_a_drop_is_worded_as_cilium_words_it() -> None:
    egress: dict[str, Any] = {"traffic_direction": TrafficDirection.EGRESS}
    auth: dict[str, Any] = {"drop_reason_desc": DropReason.AUTH_REQUIRED}
    icmp = Layer4(ICMPv4=ICMPv4(type=8))
    dns = Layer4(UDP=UDP(destination_port=53))
    assert [
        drop_note(drop(WEB, DB)),
        drop_note(drop(WORLD, DB, icmp)),
        drop_note(drop(PREFIX, DB, **auth)),
        drop_note(drop(FlowEndpoint(), DB)),
        drop_note(drop(WEB, DB, dns, **egress)),
        drop_note(drop(WEB, WORLD, None, **egress)),
        drop_note(drop(WEB, DB, traffic_direction=TrafficDirection.TRAFFIC_DIRECTION_UNKNOWN)),
    ] == [
        "Incoming packet dropped (policy_denied) from default/web-1 (10.0.0.1) TCP/80",
        "Incoming packet dropped (policy_denied) from world (10.0.0.1) ICMPv4",
        "Incoming packet dropped (auth_required) from 10.0.0.1 TCP/80",
        "Incoming packet dropped (policy_denied) from unknown (10.0.0.1) TCP/80",
        "Outgoing packet dropped (policy_denied) to default/db-1 (10.0.0.2) UDP/53",
        "Outgoing packet dropped (policy_denied) to world (10.0.0.2)",
        "Outgoing packet dropped (policy_denied) to default/db-1 (10.0.0.2) TCP/80",
    ]


@asynccontextmanager
async def reporting(server: ApiServer, flows: FlowObserver, **settings: object) -> AsyncIterator[Hive]:
    client = connect(Access(servers=(f"http://127.0.0.1:{server.port}",), token=ADMIN_TOKEN), qps=0)
    pods: Table[tuple[str, str], Pod] = Table("pods", key=lambda row: row.key)
    pods.put(Pod(metadata=Meta(name="db-1", namespace="default", uid="uid-db")))

    async def reachable() -> None:
        await anyio.lowlevel.checkpoint()

    hive = Hive(
        module(
            "hubble",
            "Drops as events",
            config(DropEventSettings),
            provide(DropEvents),
            invoke(DropEvents),
            replace(Hubble, fake(Hubble, observer=flows)),
            replace(KubernetesAPI, fake(KubernetesAPI, enabled=True, client=client, reachable=reachable)),
            replace(AgentConfig, fake(AgentConfig, node_name="node1")),
            supply(pods, Table[tuple[str, str], Pod]),
        ),
        settings={"hubble-drop-events": True, **settings},
    )
    try:
        async with hive.started():
            yield hive
    finally:
        await client.reset()


def events_of(server: ApiServer) -> list[dict[str, Any]]:
    return list(server.store.of(Resource("events.k8s.io", "events")).objects.values())


@pytest.mark.anyio
async def test_drops_of_the_chosen_reasons_are_reported_once_an_interval_and_counted_then() -> None:
    origin = FlowOrigin(node_name="default/n1")
    flows = FlowObserver(127, origin, Parser(origin), "cilium v1.17.0")
    server = ApiServer()
    async with server.serving():
        async with reporting(server, flows, **{"hubble-drop-events-interval": "1h"}):

            def reported() -> bool:
                flows.add_event(drop(WEB, WEB, verdict=FlowVerdict.FORWARDED), 1)
                flows.add_event(drop(WEB, WEB, drop_reason_desc=DropReason.POLICY_DENY), 1)
                flows.add_event(drop(WEB, WORLD), 1)
                for port in (80, 81):
                    flows.add_event(drop(WEB, DB, Layer4(TCP=TCP(destination_port=port))), 1)
                return bool(events_of(server))

            await eventually(reported)
        (event,) = events_of(server)
        assert event["note"] == "Incoming packet dropped (policy_denied) from default/web-1 (10.0.0.1) TCP/80"
        assert (event["type"], event["reason"]) == ("Warning", "PacketDrop")
        assert event["reportingController"] == "cilium"
        assert event["regarding"] == {
            "apiVersion": "v1", "kind": "Pod", "name": "db-1", "namespace": "default", "uid": "uid-db",
        }  # fmt: skip

        async with reporting(server, flows, **{"hubble-drop-events-interval": "1us"}):

            def counted() -> bool:
                flows.add_event(drop(WEB, DB), 1)
                return int((events_of(server)[0].get("series") or {}).get("count", 1)) >= 3

            await eventually(counted)
        assert len(events_of(server)) == 1


@pytest.mark.anyio
async def test_unknown_reasons_are_logged_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    origin = FlowOrigin(node_name="default/n1")
    flows = FlowObserver(127, origin, Parser(origin), "cilium v1.17.0")
    server = ApiServer()
    async with server.serving():
        async with reporting(server, flows, **{"hubble-drop-events-reasons": "rain Policy_Deny"}):

            def reported() -> bool:
                flows.add_event(drop(WEB, DB), 1)
                flows.add_event(drop(WEB, DB, drop_reason_desc=DropReason.DROP_REASON_UNKNOWN), 1)
                flows.add_event(drop(WEB, DB, drop_reason_desc=DropReason.POLICY_DENY), 1)
                return bool(events_of(server))

            await eventually(reported)
        (event,) = events_of(server)
    assert event["note"] == "Incoming packet dropped (policy_deny) from default/web-1 (10.0.0.1) TCP/80"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "unknown drop reason" in line]
    assert "rain" in line


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="hubble-drop-events-interval: expected more than 0"):
        DropEventSettings(
            hubble_drop_events_interval=type(DropEventSettings().hubble_drop_events_interval)(0)
        ).validate()
