"""A pod attached as by an unmodified cilium-cni: REST only, with the real agent and kernel.

The plugin's own work (link up before PUT, addresses and routes in the pod) is done here.
"""

from __future__ import annotations

import json
import socket
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from anyio import to_thread
from yarl import URL

from cells.agent import agent
from cells.netlink.connection import open_socket
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.namespaces import PodLink
from cells.netlink.rows import mac_text, random_mac
from lifecycle import Hive
from tests.support.namespaces import inside, new_netns

pytestmark = pytest.mark.kernel

SOCKET = Path("/var/run/cilium/cilium.sock")
HOST_LINK = "lxc0123456789ab"
SETTINGS = {"ipv4-range": "10.77.0.0/24", "policy-map-pool": 2}


@pytest.mark.usefixtures("in_node")
async def test_a_pod_of_the_stock_plugin_reaches_the_node_until_it_is_deleted() -> None:
    async with Hive(agent, settings=SETTINGS).started() as hive, session() as client:
        assert (await ask(client, "GET", "/v1/config"))[0] == 200
        _, config = await ask(client, "GET", "/v1/config")
        gateway = IPv4Address(config["status"]["addressing"]["ipv4"]["ip"])
        assert config["status"]["ipLocalReservedPorts"] == "8472"  # VXLAN's
        assert (config["status"]["masquerade"], config["status"]["masqueradeProtocols"]) == (
            True,
            {"ipv4": True},
        )
        assert config["status"]["nodeMonitor"]["npages"] > 0
        status, lease = await ask(client, "POST", "/v1/ipam?owner=default%2Fweb-0", Expiration="true")
        assert status == 201
        address = IPv4Address(lease["address"]["ipv4"])

        with new_netns() as pod:
            pair = VethPair(HOST_LINK, random_mac(), "eth0", random_mac(), 1500, pod.net)
            links = hive.get(HostLinks)
            made = links.create_veth(pair)
            links.activate(made.host_ifindex, "a link of the stock plugin")
            status, endpoint = await ask(
                client,
                "PUT",
                "/v1/endpoint/cilium-local:0",
                {
                    "addressing": {
                        "ipv4": str(address),
                        "ipv4-pool-name": lease["address"]["ipv4-pool-name"],
                        "ipv4-expiration-uuid": lease["ipv4"]["expiration-uuid"],
                    },
                    "container-id": "cid1",
                    "container-interface-name": "eth0",
                    "datapath-configuration": {},
                    "host-mac": mac_text(pair.host_mac),
                    "interface-index": made.host_ifindex,
                    "interface-name": HOST_LINK,
                    "k8s-namespace": "default",
                    "k8s-pod-name": "web-0",
                    "mac": mac_text(pair.pod_mac),
                    "state": "waiting-for-identity",
                    "sync-build-endpoint": True,
                },
            )
            assert status == 201, endpoint
            assert endpoint["status"]["networking"]["mac"] == mac_text(pair.pod_mac)
            with inside(pod):
                rtnetlink = open_socket()
                client_socket = socket.socket()
                late_socket = socket.socket()
            PodLink(rtnetlink).configure(made.pod_ifindex, "eth0", (address,), (gateway,), 1500)

            with socket.create_server((str(gateway), 0)) as server, client_socket, late_socket:
                await to_thread.run_sync(connect, client_socket, server.getsockname())
                peer, source = server.accept()
                peer.close()
                assert source[0] == str(address)

                assert await ask(client, "DELETE", "/v1/endpoint", {"container-id": "cid1"}) == (200, None)
                with pytest.raises(TimeoutError):
                    await to_thread.run_sync(connect, late_socket, server.getsockname(), 0.5)
        assert await ask(client, "GET", "/v1/endpoint") == (200, [])
        _, health = await ask(client, "GET", "/v1/healthz")
        assert health["ipam"]["allocations"] == {str(gateway): "router"}


def session() -> aiohttp.ClientSession:
    """A client of the agent's socket."""
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(SOCKET)))


async def ask(
    client: aiohttp.ClientSession, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    """Status and decoded body of one call."""
    url = URL(f"http://localhost{path}", encoded=True)
    async with client.request(method, url, json=body, headers=headers) as got:
        raw = await got.read()
        return got.status, json.loads(raw) if raw else None


def connect(end: socket.socket, address: tuple[str, int], seconds: float = 5.0) -> None:
    """Connect, within so many seconds."""
    end.settimeout(seconds)
    end.connect(address)
