"""A node with a client that has a policy about names, a DNS server, and a web server outside."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.flows import tcp_listener
from tests.node.agent.manifests import pod, write
from tests.support.agents import serving
from tests.support.dns import Looked, dnsmasq, lookup
from tests.support.waiting import eventually

WEB = "web.example.org"
POLICY: dict[str, Any] = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "names", "namespace": "default"},
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "client"}},
        "egress": [
            {
                "toEndpoints": [{"matchLabels": {"app": "dns"}}],
                "toPorts": [
                    {
                        "ports": [{"port": "53", "protocol": "ANY"}],
                        "rules": {"dns": [{"matchPattern": "*.example.org"}]},
                    }
                ],
            },
            {"toFQDNs": [{"matchName": WEB}]},
        ],
    },
}
REFUSED = 5


def connects(address: str, port: int) -> bool:
    """Return whether a connection is established, within a time that allows for one retransmission."""
    with socket.socket() as client:
        client.settimeout(1.5)
        try:
            client.connect((address, port))
        except OSError:
            return False
        return True


@dataclass
class FQDNScenario:
    """A client with a policy about names, its DNS server, and a web server outside."""

    node: Lab
    pid: int
    here: Namespaces
    client: pods.Attached
    server: pods.Attached
    port: int
    folder: Path

    def look(self, name: str = WEB, *, tcp: bool = False, version: int = 4) -> Looked:
        """Send a query to one of the server's addresses."""
        address = self.server.ipv4 if version == 4 else self.server.ipv6
        return self.here.run(partial(lookup, address, name, tcp=tcp, version=version))

    def reaches_web(self) -> bool:
        """Return whether the client can connect to the web server."""
        return self.here.run(connects, OUTSIDE_ADDRESS, self.port)

    @property
    def cached(self) -> set[tuple[str, str, str]]:
        """Return the cached names: name, address, source."""
        found = ask("/v1/fqdn/cache", api_socket(self.pid))
        return {(one["fqdn"], ip, one["source"]) for one in found for ip in one["ips"]}


@contextmanager
def fqdn_scenario(node: Lab, folder: Path, *settings: str, ttl: int = 300) -> Iterator[FQDNScenario]:
    write(folder, "dns", pod("dns", {"app": "dns"}))
    write(folder, "client", pod("client", {"app": "client"}))
    pid = serving(node, f"--manifests-dir={folder}", "--enable-ipv6=true", *settings)
    server = pods.add(node, "dns")
    client = pods.add(node, "client")
    with node.open_outside() as outside, inside(outside):
        listener = tcp_listener()
    with listener, node.open_pod("dns") as there, node.open_pod("client") as here:
        found = FQDNScenario(node, pid, here, client, server, listener.getsockname()[1], folder)
        records = f"{WEB}/{OUTSIDE_ADDRESS}", f"{WEB}/2001:db8::80", "example.com/192.0.2.9"
        with dnsmasq(there, *records, ttl=ttl):
            eventually(lambda: found.look().addresses == (OUTSIDE_ADDRESS,))
            write(folder, "policy", POLICY)
            eventually(lambda: found.look("other.example.com").code == REFUSED)
            yield found
