"""toFQDNs rules: the names that pods may query, and the addresses that they may then connect to."""

from __future__ import annotations

import json
import select
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cells.observe.events import LookupRecord
from cells.observe.monitor import SOCKET
from cells.proxy.dns.port import FILE, NAME
from hive.client import ask, connect
from hive.lab import agent_process
from hive.lab.agent_process import api_socket
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from tests.node.agent.manifests import write
from tests.node.agent.node_ports import command
from tests.support.agents import serving
from tests.support.dns_script import TRUE, addresses_of, serve
from tests.support.dns_script import ask as ask_server
from tests.support.fqdn_scenario import REFUSED, WEB, connects, fqdn_scenario
from tests.support.requests import monitored
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def test_to_fqdns_allows_the_addresses_that_dns_returned(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path) as place:
        assert not place.reaches_web(), "the name is not known yet"
        for tcp in (False, True):
            assert place.look(tcp=tcp).addresses == (OUTSIDE_ADDRESS,)
            assert place.look(tcp=tcp, version=6).addresses == ("2001:db8::80",)
            assert place.look("other.example.com", tcp=tcp).code == REFUSED
        assert place.reaches_web(), "at once: the answer came after the map entries"
        explained = ask(
            f"/hive/policy/explain?source=default/client&destination={WEB}", api_socket(place.pid)
        )
        assert explained["allowed"]
        rules = {tuple(way["directions"][0]["rules"]) for way in explained["ways"]}
        assert rules == {("spec.egress[1] of CiliumNetworkPolicy default/names",)}, "which rule allows a name"
        retained = json.loads((Path(f"/proc/{place.pid}/root/run/cilium/{FILE}")).read_text(encoding="ascii"))
        for address in (NODE_ADDRESS, place.server.ipv4, "127.0.0.1"):
            assert not place.here.run(connects, address, retained[NAME]["port"]), (
                "nobody asks the proxy itself"
            )
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


@pytest.mark.parametrize("masqueraded", ["true", "false"])
def test_a_server_outside_is_asked_in_the_pods_name(node: Lab, tmp_path: Path, masqueraded: str) -> None:
    settings = (f"--enable-ipv4-masquerade={masqueraded}", "--routing-mode=native")
    with fqdn_scenario(node, tmp_path, *settings) as place, node.open_outside() as outside:
        outside.run(command, f"route add {place.client.ipv4} via {NODE_ADDRESS}")
        write(tmp_path, "outside", SERVERS_OUTSIDE)
        serving = outside.start(serve)

        def spoken(name: str, *, tcp: bool = False) -> bytes:
            return place.here.run(partial(ask_server, OUTSIDE_ADDRESS, name, tcp=tcp), within=60)

        eventually(lambda: place.here.run(answers, "plain.example.org"))
        for tcp in (False, True):
            assert addresses_of(spoken("plain.example.org", tcp=tcp)) == [TRUE]
            assert spoken("plain.example.com", tcp=tcp)[3] & 0xF == REFUSED, "the proxy reads what is asked"
        asked = serving.finish(within=60)
    assert asked == {NODE_ADDRESS if masqueraded == "true" else place.client.ipv4}


def answers(name: str) -> bool:
    """Whether the server outside is heard by UDP."""
    try:
        return bool(addresses_of(ask_server(OUTSIDE_ADDRESS, name, 0.5)))
    except OSError:
        return False


SERVERS_OUTSIDE: dict[str, Any] = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "outside", "namespace": "default"},
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "client"}},
        "egress": [
            {
                "toEntities": ["world"],
                "toPorts": [
                    {
                        "ports": [{"port": "53", "protocol": "ANY"}],
                        "rules": {"dns": [{"matchPattern": "*.example.org"}]},
                    }
                ],
            }
        ],
    },
}


def test_the_monitor_shows_dns_lookups(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path) as place, connect(api_socket(place.pid).with_name(SOCKET)) as stream:
        eventually(lambda: place.look().addresses and select.select([stream], [], [], 0.2)[0])
        place.look()  # of the first, the event of the query may have come before we listened
        lookups = monitored(stream, LookupRecord)
        request = next(one for one in lookups if one.query == f"{WEB}." and not one.answer)
        answer = next(one for one in lookups if one.answer)
        assert (request.verdict, request.type, request.protocol) == ("Forwarded", 1, 17)
        assert (request.source, request.destination) == (answer.destination, answer.source)
        assert request.destination.address == place.server.ipv4
        assert "k8s:app=client" in request.source.labels
        assert "k8s:app=dns" in request.destination.labels
        assert (answer.code, answer.addresses, answer.answer_types) == (0, (OUTSIDE_ADDRESS,), (1,))
        place.look("other.example.com", tcp=True)
        refused = next(one for one in lookups if one.query == "other.example.com.")
        assert (refused.verdict, refused.code, refused.protocol) == ("Denied", REFUSED, 6)
