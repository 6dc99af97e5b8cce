"""Services on real links: segmentation and checksum offloads."""

import socket
import threading

import pytest

from tests.kernel.datapath.node import LivePod, running
from tests.kernel.datapath_services.services import PORT, TARGET, VIP, VIP6, Backend, Services
from tests.support.namespaces import in_node, inside

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

MEGABYTES = 8
FAMILIES = {4: (socket.AF_INET, VIP), 6: (socket.AF_INET6, VIP6)}


def exchange(source: LivePod, target: LivePod, version: int) -> tuple[int, int, str]:
    """Send megabytes to the service and get as many back: how many came, and the peer that the client saw."""
    family, vip = FAMILIES[version]
    data = bytes(1 << 20)
    with inside(target.net):
        server = socket.socket(family)
    server.bind(("", TARGET))
    server.listen()
    received = 0

    def serve() -> None:
        nonlocal received
        connection, _ = server.accept()
        with connection:
            while received < MEGABYTES << 20:
                received += len(connection.recv(1 << 20))
            for _ in range(MEGABYTES):
                connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    with inside(source.net):
        client = socket.socket(family)
    answered = 0
    with client, server:
        client.settimeout(30)
        client.connect((vip, PORT))
        for _ in range(MEGABYTES):
            client.sendall(data)
        while answered < MEGABYTES << 20:
            answered += len(client.recv(1 << 20))
        peer = str(client.getpeername()[0])
        thread.join(60)
    return received, answered, peer


@pytest.mark.parametrize("version", [4, 6])
async def test_megabytes_go_to_a_service_and_back(in_node: None, version: int) -> None:
    async with running() as node:
        node.add_host()
        one, two = node.add_pod(10, ipv6=True), node.add_pod(11, ipv6=True)
        services = Services({table.spec.name: table for table in node.maps.all()})
        services.serve(FAMILIES[version][1], [Backend(1, two.address(version))])
        whole = MEGABYTES << 20
        assert exchange(one, two, version) == (whole, whole, FAMILIES[version][1])
        assert node.drops(ipv6=True) == {}


async def test_a_pod_sends_itself_megabytes_by_its_own_service(in_node: None) -> None:
    async with running() as node:
        node.add_host()
        pod = node.add_pod(10, ipv6=True)
        services = Services({table.spec.name: table for table in node.maps.all()})
        services.serve(VIP, [Backend(1, pod.address(4))])
        whole = MEGABYTES << 20
        assert exchange(pod, pod, 4) == (whole, whole, VIP)


@pytest.mark.parametrize("version", [4, 6])
async def test_a_connection_to_a_service_without_backends_fails_at_once(in_node: None, version: int) -> None:
    async with running() as node:
        node.add_host()
        pod = node.add_pod(10, ipv6=True)
        Services({table.spec.name: table for table in node.maps.all()}).serve(FAMILIES[version][1], [])
        with inside(pod.net):
            client = socket.socket(FAMILIES[version][0])
        with client:
            client.settimeout(30)
            with pytest.raises(ConnectionRefusedError):
                client.connect((FAMILIES[version][1], PORT))
