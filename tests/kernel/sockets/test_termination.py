"""Sockets to a removed backend are terminated, and no others."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import anyio
import pytest

from cells.maps.records.flows import ReverseSk, ReverseSkKey
from cells.services import Backend as ServiceBackend
from cells.services import Frontend, FrontendKey, ServiceAddress, ServiceName, ServiceType
from cells.services.control import ServedFrontend
from cells.services.sockets.kernel import KernelSockets
from lifecycle.testing import eventually
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, VIP6, Backend
from tests.kernel.sockets.clients import TCP, UDP, V4, V6, a_pod
from tests.kernel.sockets.place import Served, serving
from tests.support.cgroups import cgroup
from tests.support.namespaces import in_node, inside

__all__ = ["cgroup", "in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

REMOVED, STAYS = "127.0.0.1", "127.0.0.2"
OTHER = "10.96.0.11"


async def serve(node: Served, *services: tuple[str, tuple[str, ...]], protocol: int = 17) -> None:
    """These services have these backends from now on, in the maps and in the agent's table."""
    frontends = []
    for number, (vip, backends) in enumerate(services, 1):
        node.services.serve(
            vip,
            [Backend(number * 10 + at, ip) for at, ip in enumerate(backends)],
            number=number,
            protocol=protocol,
        )
        frontend = Frontend(
            FrontendKey(ServiceAddress(ip_address(vip), PORT, protocol)),
            ServiceType.CLUSTER_IP,
            ServiceName("shop", f"web-{number}"),
            tuple(ServiceBackend(ServiceAddress(ip_address(ip), TARGET, protocol)) for ip in backends),
        )
        frontends.append(ServedFrontend(number, frontend))
    node.report(*frontends)
    await anyio.wait_all_tasks_blocked()  # the agent has seen it


@contextmanager
def connected(ip: str, port: int = PORT, family: int = V4) -> Iterator[socket.socket]:
    with socket.socket(family, UDP) as caller:
        caller.connect((ip, port))
        yield caller


def fault(caller: socket.socket) -> int:
    """The error that the socket's owner gets, once."""
    return caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def peer(caller: socket.socket) -> bool:
    try:
        caller.getpeername()
    except OSError as error:
        assert error.errno == errno.ENOTCONN  # noqa: PT017
        return False
    return True


async def test_only_sockets_that_the_service_sent_to_the_backend_end(in_node: None, cgroup: Path) -> None:
    pod = a_pod()
    async with serving(cgroup) as node:
        await serve(node, (VIP, (REMOVED,)), (OTHER, (REMOVED,)))
        with inside(pod):
            of_pod = socket.socket(V4, UDP)
        with (
            of_pod,
            connected(VIP) as own,
            connected(f"::ffff:{VIP}", family=V6) as mapped,
            connected(OTHER) as of_another_service,
            connected(REMOVED, TARGET) as direct,
            connected(VIP) as moved,
            socket.socket(V4, UDP) as unconnected,
            socket.socket(V4, TCP) as stream,
        ):
            of_pod.connect((VIP, PORT))
            unconnected.sendto(b"question", (VIP, PORT))
            moved.connect((REMOVED, TARGET))  # the same address, but by itself
            stream.bind((REMOVED, 0))
            await serve(node, (VIP, (STAYS,)), (OTHER, (REMOVED,)))
            await eventually(lambda: not peer(own) and not peer(mapped) and not peer(of_pod))
            assert {fault(own), fault(mapped), fault(of_pod)} == {errno.ECONNABORTED}
            assert peer(of_another_service)
            assert peer(direct)
            assert peer(moved)
            assert fault(of_another_service) == fault(direct) == fault(moved) == fault(unconnected) == 0
            own.connect((VIP, PORT))
            assert node.backends_of(own) == {(STAYS, TARGET)}


async def test_sockets_of_ipv6_end_too(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        await serve(node, (VIP6, ("::1",)))
        with connected(VIP6, family=V6) as caller:
            await serve(node, (VIP6, ()))
            await eventually(lambda: not peer(caller))


async def test_sockets_of_backends_removed_without_an_agent_are_closed(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        await serve(node, (VIP, (REMOVED,)))
        caller = socket.socket(V4, UDP)
        caller.connect((VIP, PORT))
    async with serving(cgroup) as node:
        await serve(node, (VIP, (STAYS,)))
        await eventually(lambda: not peer(caller))
        caller.close()


async def test_a_backend_that_comes_and_goes_while_sockets_are_looked_at_ends_its_sockets(
    in_node: None, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()
    remembered = KernelSockets.remembered

    def slow(kernel: KernelSockets) -> list[tuple[ReverseSkKey, ReverseSk]]:
        found = list(remembered(kernel))
        started.set()
        go_on.wait(30)
        return found

    monkeypatch.setattr(KernelSockets, "remembered", slow)
    async with serving(cgroup) as node:
        await eventually(started.is_set)
        await serve(node, (VIP, (REMOVED,)))
        with connected(VIP) as caller:
            await serve(node, (VIP, (STAYS,)))
            go_on.set()
            await eventually(lambda: not peer(caller))


async def test_without_termination_in_pods_only_sockets_of_the_node_are_closed(
    in_node: None, cgroup: Path
) -> None:
    pod = a_pod()
    async with serving(cgroup, bpf_lb_sock_terminate_pod_connections="false") as node:
        await serve(node, (VIP, (REMOVED,)))
        with inside(pod):
            of_pod = socket.socket(V4, UDP)
        with of_pod, connected(VIP) as own:
            of_pod.connect((VIP, PORT))
            await serve(node)
            await eventually(lambda: not peer(own))
            assert peer(of_pod)


@pytest.mark.parametrize("asked", [True, False])
async def test_connections_end_only_when_asked_for(in_node: None, cgroup: Path, asked: bool) -> None:
    async with serving(cgroup, bpf_lb_sock_terminate_all_protos=str(asked).lower()) as node:
        await serve(node, (VIP, (REMOVED,)), protocol=0)
        with (
            socket.socket(V4, TCP) as server,
            socket.socket(V4, TCP) as caller,
            connected(VIP) as datagrams,
        ):
            server.bind((REMOVED, TARGET))
            server.listen()
            caller.connect((VIP, PORT))
            await serve(node, (VIP, ()), protocol=0)
            await eventually(lambda: not peer(datagrams))
            assert (fault(caller) == errno.ECONNABORTED) == asked
