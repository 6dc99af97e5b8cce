"""Rules that speak of names: what pods may ask for, and where they may go for having asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.flows import tcp_listener
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from tests.node.agent.test_pod_labels import pod, write
from tests.support.agents import serving
from tests.support.dns import Looked, dnsmasq, lookup
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

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
    """Whether a connection comes about, within half a second."""
    with socket.socket() as client:
        client.settimeout(0.5)
        try:
            client.connect((address, port))
        except OSError:
            return False
        return True


@dataclass
class Town:
    """A client whose policy speaks of names, its DNS server, and a web server outside."""

    node: Lab
    pid: int
    here: Namespaces
    server: pods.Attached
    port: int
    folder: Path

    def look(self, name: str = WEB, *, tcp: bool = False, version: int = 4) -> Looked:
        """Ask the server by one of its addresses."""
        address = self.server.ipv4 if version == 4 else self.server.ipv6
        return self.here.run(partial(lookup, address, name, tcp=tcp, version=version))

    def reaches_web(self) -> bool:
        """Whether the client may go there."""
        return self.here.run(connects, OUTSIDE_ADDRESS, self.port)

    @property
    def cached(self) -> set[tuple[str, str, str]]:
        """Name, address and source of what is known of names."""
        found = ask("/v1/fqdn/cache", api_socket(self.pid))
        return {(one["fqdn"], ip, one["source"]) for one in found for ip in one["ips"]}


@contextmanager
def town(node: Lab, folder: Path, *settings: str, ttl: int = 300) -> Iterator[Town]:
    write(folder, "dns", pod("dns", {"app": "dns"}))
    write(folder, "client", pod("client", {"app": "client"}))
    pid = serving(node, f"--manifests-dir={folder}", "--enable-ipv6=true", *settings)
    server = pods.add(node, "dns")
    pods.add(node, "client")
    with node.open_outside() as outside, inside(outside):
        listener = tcp_listener()
    with listener, node.open_pod("dns") as there, node.open_pod("client") as here:
        found = Town(node, pid, here, server, listener.getsockname()[1], folder)
        records = f"{WEB}/{OUTSIDE_ADDRESS}", f"{WEB}/2001:db8::80", "example.com/192.0.2.9"
        with dnsmasq(there, *records, ttl=ttl):
            eventually(lambda: found.look().addresses == (OUTSIDE_ADDRESS,))
            write(folder, "policy", POLICY)
            eventually(lambda: found.look("other.example.com").code == REFUSED)
            yield found


def test_a_pod_goes_where_dns_said_a_name_is(node: Lab, tmp_path: Path) -> None:
    with town(node, tmp_path) as place:
        assert not place.reaches_web(), "the name is not known yet"
        for tcp in (False, True):
            assert place.look(tcp=tcp).addresses == (OUTSIDE_ADDRESS,)
            assert place.look(tcp=tcp, version=6).addresses == ("2001:db8::80",)
            assert place.look("other.example.com", tcp=tcp).code == REFUSED
        assert place.reaches_web(), "at once: the answer came after the map entries"
        assert place.cached == {(f"{WEB}.", ip, "lookup") for ip in (OUTSIDE_ADDRESS, "2001:db8::80")}
        agent_process.crash(place.node)
        assert place.look().addresses == (OUTSIDE_ADDRESS,), "without an agent the server is asked directly"
        assert place.reaches_web()
        place.pid = serving(node, f"--manifests-dir={tmp_path}", "--enable-ipv6=true")
        assert place.reaches_web()
        assert (f"{WEB}.", OUTSIDE_ADDRESS, "lookup") in place.cached
        eventually(lambda: place.look("other.example.com").code == REFUSED)
        ask("/v1/fqdn/cache", api_socket(place.pid), method="DELETE")
        eventually(lambda: not place.reaches_web())
