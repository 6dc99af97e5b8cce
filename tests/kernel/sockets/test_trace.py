"""Trace events of sockets: the selected backend, and the address that replies come from."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from pathlib import Path

import anyio
import pytest

from cells.maps.records.endpoints import NODE_NOTIFY_SOCK, NodeConfig
from cells.observe.events import Sample, Subscription, TraceSock, decode, event_text
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, VIP6, Backend
from tests.kernel.sockets.place import Served, cookie_of, serving
from tests.support.cgroups import cgroup
from tests.support.namespaces import in_node
from tests.support.processor import on_one_processor

__all__ = ["cgroup", "in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

BEFORE, AFTER, BACK_BEFORE, BACK_AFTER = 1, 2, 3, 4
TCP, UDP = 1, 2
WITHIN = 30.0


def number_of(group: Path) -> int:
    """The kernel's of a control group."""
    return group.stat().st_ino


def report(node: Served, flags: int) -> None:
    """Which events the programs of the node send."""
    row = NodeConfig(None, 1, bytes(6), 1, bytes(6), None, flags)
    node.maps.node.update(bytes(4), row.pack())


async def heard(subscription: Subscription, count: int) -> list[TraceSock]:
    found: list[TraceSock] = []
    with anyio.fail_after(WITHIN):
        while len(found) < count:
            for each in await anext(subscription):
                event = decode(each.data) if isinstance(each, Sample) else each
                assert isinstance(event, TraceSock)
                found.append(event)
    assert len(found) == count
    return found


@pytest.mark.parametrize(
    ("family", "vip", "backend"),
    [(socket.AF_INET, VIP, "127.0.0.1"), (socket.AF_INET6, VIP6, "::1")],
)
async def test_socket_traces_have_both_directions_of_a_translation(
    in_node: None, cgroup: Path, family: int, vip: str, backend: str
) -> None:
    async with serving(cgroup) as node:
        report(node, NODE_NOTIFY_SOCK)
        node.services.serve(vip, [Backend(1, backend)])
        with (
            node.events.subscribe() as events,
            socket.socket(family, socket.SOCK_DGRAM) as server,
            on_one_processor(),
        ):
            server.bind((backend, TARGET))
            with socket.socket(family, socket.SOCK_DGRAM) as caller:
                caller.settimeout(WITHIN)
                caller.sendto(b"question", (vip, PORT))
                server.sendto(b"answer", server.recvfrom(64)[1])
                caller.recvfrom(64)
                traces = await heard(events, 4)
                cookie = cookie_of(caller)
        service, served = (ip_address(vip), PORT), (ip_address(backend), TARGET)
        assert [(each.point, (each.address, each.port)) for each in traces] == [
            (BEFORE, service),
            (AFTER, served),
            (BACK_BEFORE, served),
            (BACK_AFTER, service),
        ]
        group = number_of(cgroup)
        assert {(each.cookie, each.cgroup, each.protocol) for each in traces} == {(cookie, group, UDP)}
        end = f"[{vip}]:{PORT}" if ":" in vip else f"{vip}:{PORT}"
        text = f"socket, pre-xlate-fwd: {end} udp, cgroup {group}, cookie {cookie}"
        assert event_text(traces[0]) == text


async def test_socket_traces_are_emitted_only_when_enabled(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        with node.events.subscribe() as events, socket.socket() as server:
            server.bind(("127.0.0.1", TARGET))
            server.listen()
            cookies = []
            for flags in (0, NODE_NOTIFY_SOCK):
                report(node, flags)
                with socket.create_connection((VIP, PORT), WITHIN) as caller:
                    cookies.append(cookie_of(caller))
            traces = await heard(events, 2)
        assert {(each.cookie, each.protocol) for each in traces} == {(cookies[1], TCP)}
