"""Processes that connect to services see the service's address, whichever backend responds."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import pytest

from cells.maps.records.flows import SkipLbKey
from cells.netlink.namespaces import own_netns_cookie
from cells.services import BackendState, ServiceFlag
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, VIP6, Backend
from tests.kernel.sockets.clients import TCP, UDP, V4, V6, a_pod
from tests.kernel.sockets.place import HOST, REMOTE_NODE, serving
from tests.support.cgroups import cgroup
from tests.support.namespaces import in_node, inside

__all__ = ["cgroup", "in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

NODE = "192.0.2.1"

CLIENTS = {
    "IPv4": (V4, VIP, V4, "127.0.0.1"),
    "IPv6": (V6, VIP6, V6, "::1"),
    "IPv4 in IPv6": (V6, f"::ffff:{VIP}", V4, "127.0.0.1"),
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_tcp_client_talks_to_a_backend_and_sees_the_service(
    in_node: None, cgroup: Path, client: str
) -> None:
    family, vip, backend_family, backend = CLIENTS[client]
    async with serving(cgroup) as node:
        with socket.socket(backend_family, TCP) as server, socket.socket(family, TCP) as caller:
            server.bind((backend, TARGET))
            server.listen()
            node.services.serve(vip.removeprefix("::ffff:"), [Backend(1, backend)], protocol=6)
            caller.settimeout(30)
            caller.connect((vip, PORT))
            served, address = server.accept()
            with served:
                served.sendall(b"hello")
            assert caller.recv(16) == b"hello"
            assert caller.getpeername()[:2] == (vip, PORT)
            assert address[0] == backend


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_udp_client_gets_answers_from_the_service(
    in_node: None, cgroup: Path, client: str, connected: bool
) -> None:
    family, vip, backend_family, backend = CLIENTS[client]
    async with serving(cgroup) as node:
        with socket.socket(backend_family, UDP) as server, socket.socket(family, UDP) as caller:
            server.bind((backend, TARGET))
            node.services.serve(vip.removeprefix("::ffff:"), [Backend(1, backend)], protocol=17)
            server.settimeout(30)
            caller.settimeout(30)
            if connected:
                caller.connect((vip, PORT))
                caller.send(b"question")
                assert caller.getpeername()[:2] == (vip, PORT)
            else:
                caller.sendto(b"question", (vip, PORT))
            question, asker = server.recvfrom(64)
            server.sendto(b"answer", asker)
            answer, sender = caller.recvfrom(64)
            assert (question, answer) == (b"question", b"answer")
            assert sender[:2] == (vip, PORT)


@pytest.mark.parametrize(
    ("response", "error"), [("reject", errno.ECONNREFUSED), ("drop", errno.EHOSTUNREACH)]
)
async def test_a_service_without_backends_refuses(
    in_node: None, cgroup: Path, response: str, error: int
) -> None:
    async with serving(cgroup, service_no_backend_response=response) as node:
        for vip in (VIP, VIP6):
            node.services.serve(vip, [])
        for family, vip, _, _ in CLIENTS.values():
            for kind in (TCP, UDP):
                with socket.socket(family, kind) as caller, pytest.raises(OSError) as failed:  # noqa: PT011
                    caller.connect((vip, PORT))
                assert (vip, kind, failed.value.errno) == (vip, kind, error)
            with socket.socket(family, UDP) as caller, pytest.raises(OSError) as failed:  # noqa: PT011
                caller.sendto(b"question", (vip, PORT))
            assert (vip, failed.value.errno) == (vip, error)


async def test_connections_to_other_addresses_are_unchanged(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")], protocol=6)
        with socket.socket(V4, UDP) as caller:
            caller.connect(("127.0.0.1", PORT))
            assert node.backends_of(caller) == set()
            caller.connect(("127.0.0.1", TARGET))
            assert caller.getpeername() == ("127.0.0.1", TARGET)


async def test_pods_are_served_unless_only_the_host_is(in_node: None, cgroup: Path) -> None:
    pod = a_pod()
    for host_only, reached in (("false", {("127.0.0.1", TARGET)}), ("true", set())):
        async with serving(cgroup, bpf_lb_sock_hostns_only=host_only) as node:
            node.services.serve(VIP, [Backend(1, "127.0.0.1")])
            with inside(pod):
                caller = socket.socket(V4, UDP)
            with caller, socket.socket(V4, UDP) as own:
                try:
                    caller.connect((VIP, PORT))
                except OSError as error:
                    assert (host_only, error.errno) == ("true", errno.ENETUNREACH)  # noqa: PT017
                own.connect((VIP, PORT))
                assert node.backends_of(caller) == reached
                assert node.backends_of(own) == {("127.0.0.1", TARGET)}


async def test_a_namespace_stays_with_its_backend(in_node: None, cgroup: Path) -> None:
    backends = [Backend(number, f"127.0.0.{number}") for number in range(1, 9)]
    flags = ServiceFlag.ROUTABLE | ServiceFlag.AFFINITY
    async with serving(cgroup) as node:
        node.services.serve(VIP, backends, flags=flags, timeout=100)

        def reached() -> set[tuple[str, int]]:
            with socket.socket(V4, UDP) as caller:
                caller.connect((VIP, PORT))
                return node.backends_of(caller)

        first = reached()
        assert all(reached() == first for _ in range(20))
        node.services.age_clients(101)
        ((address, _),) = reached()
        node.services.part(1, next(each for each in backends if each.ip == address))
        others = set()
        for _ in range(20):
            node.services.age_clients(101)
            others |= reached()
        assert len(others) > 1


async def test_a_port_of_the_node_is_reached_by_every_address_of_a_node(in_node: None, cgroup: Path) -> None:
    flags = ServiceFlag.NODE_PORT
    async with serving(cgroup) as node:
        node.services.serve("0.0.0.0", [Backend(1, "127.0.0.9")], port=30080, flags=flags)
        node.belongs_to(NODE, HOST)
        node.belongs_to("192.0.2.2", REMOTE_NODE)
        for target, is_node in (
            ("127.0.0.1", True),
            ("127.5.5.5", True),
            (NODE, True),
            ("192.0.2.2", True),
            ("127.0.0.1:30081", False),
        ):
            ip, _, port = target.partition(":")
            with socket.socket(V4, UDP) as caller:
                caller.bind(("127.0.0.1", 0))
                try:
                    caller.connect((ip, int(port or 30080)))
                except OSError as error:
                    assert error.errno in {errno.ENETUNREACH, errno.EINVAL}  # noqa: PT017
                assert bool(node.backends_of(caller)) == is_node, target


@pytest.mark.parametrize(("family", "own"), [(V4, "127.0.0.1"), (V4, "0.0.0.0"), (V6, "::1"), (V6, "::")])
async def test_a_node_port_on_the_loopback_of_a_pod_is_not_translated(
    in_node: None, cgroup: Path, family: int, own: str
) -> None:
    wildcard, backend = ("0.0.0.0", "127.0.0.9") if family == V4 else ("::", "::1")
    pod = a_pod()
    async with serving(cgroup) as node:
        node.services.serve(wildcard, [Backend(1, backend)], port=30080, flags=ServiceFlag.NODE_PORT)
        with inside(pod):
            caller = socket.socket(family, UDP)
        with caller:
            caller.connect((own, 30080))
            assert node.backends_of(caller) == set()


async def test_binding_the_node_port_of_a_service_is_refused(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve("0.0.0.0", [], port=30080, flags=ServiceFlag.NODE_PORT, protocol=6)
        node.services.serve("127.0.0.7", [], port=99, number=2, flags=ServiceFlag.LOAD_BALANCER)
        for address in (("127.0.0.1", 30080), ("127.0.0.7", 99)):
            with socket.socket(V4, TCP) as server, pytest.raises(OSError, match="in use"):
                server.bind(address)
        with socket.socket(V4, UDP) as server:
            server.bind(("127.0.0.1", 30080))  # another protocol
        with socket.socket(V4, TCP) as server:
            server.bind(("127.0.0.1", 30081))
    async with serving(cgroup, node_port_bind_protection="false"):
        with socket.socket(V4, TCP) as server:
            server.bind(("127.0.0.1", 30080))


EXTERNAL = {"IPv4": (V4, "203.0.113.9", "127.0.0.1"), "IPv6": (V6, "2001:db8::9", "::1")}


@pytest.mark.parametrize("version", EXTERNAL)
async def test_an_external_address_is_served_that_no_node_has(
    in_node: None, cgroup: Path, version: str
) -> None:
    flags = ServiceFlag.EXTERNAL_IP | ServiceFlag.ROUTABLE
    family, external, backend = EXTERNAL[version]
    async with serving(cgroup) as node:
        node.services.serve(external, [Backend(1, backend)], flags=flags)
        with socket.socket(family, UDP) as caller:
            caller.connect((external, PORT))
            assert node.backends_of(caller) == {(backend, TARGET)}


@pytest.mark.parametrize("version", EXTERNAL)
async def test_an_external_address_of_another_owner_is_not_translated(
    in_node: None, cgroup: Path, version: str
) -> None:
    flags = ServiceFlag.EXTERNAL_IP | ServiceFlag.ROUTABLE
    family, external, backend = EXTERNAL[version]
    async with serving(cgroup, disable_external_ip_mitigation="false") as node:
        node.services.serve(external, [Backend(1, backend)], flags=flags)
        with socket.socket(family, UDP) as caller:
            with pytest.raises(OSError, match="unreachable"):  # there is no route in this namespace
                caller.connect((external, PORT))
            node.belongs_to(external, HOST)
            caller.connect((external, PORT))
            assert node.backends_of(caller) == {(backend, TARGET)}


async def test_a_socket_that_ended_is_forgotten(in_node: None, cgroup: Path) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        caller = socket.socket(V4, UDP)
        caller.connect((VIP, PORT))
        assert len(list(node.maps.reverse_sk4.items())) == 1
        caller.close()
        assert list(node.maps.reverse_sk4.items()) == []


async def test_getpeername_shows_the_backend_after_the_service_is_deleted(
    in_node: None, cgroup: Path
) -> None:
    async with serving(cgroup) as node:
        node.services.serve(VIP, [Backend(1, "127.0.0.1")])
        with socket.socket(V4, UDP) as caller:
            caller.connect((VIP, PORT))
            assert caller.getpeername() == (VIP, PORT)
            node.services.serve(VIP, [], number=2)
            assert caller.getpeername() == ("127.0.0.1", TARGET)
            assert node.backends_of(caller) == set()


async def test_a_backend_that_ends_gets_no_new_clients(in_node: None, cgroup: Path) -> None:
    ends = Backend(1, "127.0.0.1", state=BackendState.TERMINATING)
    async with serving(cgroup) as node:
        node.services.serve(VIP, [ends, Backend(2, "127.0.0.2")])
        reached = set()
        for _ in range(20):
            with socket.socket(V4, UDP) as caller:
                caller.connect((VIP, PORT))
                reached |= node.backends_of(caller)
        assert reached == {("127.0.0.2", TARGET)}


async def test_a_namespace_with_affinity_leaves_a_backend_that_is_terminating(
    in_node: None, cgroup: Path
) -> None:
    backends = [Backend(number, f"127.0.0.{number}") for number in range(1, 9)]
    flags = ServiceFlag.ROUTABLE | ServiceFlag.AFFINITY
    async with serving(cgroup) as node:

        def reached(states: list[Backend]) -> set[str]:
            found = set()
            node.services.serve(VIP, states, flags=flags, timeout=100)
            for _ in range(20):
                with socket.socket(V4, UDP) as caller:
                    caller.connect((VIP, PORT))
                    found |= {address for address, _ in node.backends_of(caller)}
            return found

        (first,) = reached(backends)
        ending = [each._replace(state=BackendState(each.ip == first)) for each in backends]
        (stays,) = reached(ending)
        assert stays != first
        for each in backends:  # all are about to end: the slots have them
            node.services.set_backend(each._replace(state=BackendState.TERMINATING))
        with socket.socket(V4, UDP) as caller:
            caller.connect((VIP, PORT))
            assert node.backends_of(caller) == {(stays, TARGET)}


@pytest.mark.parametrize(("family", "vip", "backend"), [(V4, VIP, "127.0.0.1"), (V6, VIP6, "::1")])
async def test_a_pod_that_stands_in_for_an_address_reaches_it_itself(
    in_node: None, cgroup: Path, family: int, vip: str, backend: str
) -> None:
    async with serving(cgroup) as node:
        node.services.serve(vip, [Backend(1, backend)], flags=ServiceFlag.LOCAL_REDIRECT)
        with socket.socket(family, UDP) as caller:
            caller.connect((vip, PORT))
            assert node.backends_of(caller) == {(backend, TARGET)}
        key = SkipLbKey(own_netns_cookie(), ip_address(vip), PORT)
        held = node.maps.skip_lb4 if family == V4 else node.maps.skip_lb6
        held.update(key.pack(), b"\0")
        with socket.socket(family, UDP) as caller:
            with suppress(OSError):  # there is no route to the address itself
                caller.connect((vip, PORT))
            assert node.backends_of(caller) == set()
