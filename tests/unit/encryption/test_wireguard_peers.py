"""The calls to the WireGuard device at each event of nodes and prefixes, compared with recordings."""

from __future__ import annotations

import base64
import json
from ipaddress import ip_address, ip_network
from types import SimpleNamespace
from typing import Any

import pytest

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.encryption import WIREGUARD_PORT
from cells.config import AgentConfig
from cells.encryption.wireguard import wireguard_peers
from cells.encryption.wireguard.peers import PeerCall, PeerError, PeerNode, WireguardPeers
from cells.encryption.wireguard.settings import EncryptionSettings
from cells.tunnel.settings import PodTunnel
from tests.support.recordings import recordings

SWALLOWED = {"node_add", "node_update", "node_validate", "ipcache_upsert", "ipcache_delete"}
"""Events for which Cilium logs an error that the recording does not have."""

DIFFERENT: dict[str, str] = {
    "pod_moves": "Cilium's old node keeps the address, and loses it when the pod moves back",
    "swap_ips": "Cilium removes an address from the node that has it now",
    "random_05_v6": "as pod_moves: an address comes back to its first node",
}


class FakeDevice:
    """A device with the kernel's semantics: adding an address to a peer removes it from another one."""

    def __init__(self, peers: dict[bytes, set[IPNetwork]]) -> None:
        self.table = peers
        self.calls: list[PeerCall] = []
        self.fail_in = 0
        self.lost = False

    def configure(self, call: PeerCall) -> None:
        self.calls.append(call)
        if self.fail_in:
            self.fail_in -= 1
            if not self.fail_in:
                raise OSError("injected: device or resource busy")
        if call.remove:
            self.table.pop(call.key, None)
            return
        for other in self.table.values():
            other.difference_update(call.allowed)
        self.table.setdefault(call.key, set()).update(call.allowed)

    def peers(self) -> dict[bytes, frozenset[IPNetwork]]:
        if self.lost:
            raise OSError("failed to obtain WireGuard device: no such device")
        return {key: frozenset(allowed) for key, allowed in self.table.items()}


def node_of(node: dict[str, Any]) -> PeerNode:
    addresses: dict[Family, IPAddress] = {}
    for text in (node.get("internal_ips") or []) + (node.get("external_ips") or []):
        address = ip_address(text)
        addresses.setdefault(Family.IPV4 if address.version == 4 else Family.IPV6, address)
    return PeerNode(f"{node['cluster']}/{node['name']}", node.get("wg_pub_key", ""), addresses)


def call_of(call: dict[str, Any]) -> PeerCall:
    (peer,) = call["peers"]
    endpoint = peer.get("endpoint")
    return PeerCall(
        base64.b64decode(peer["public_key"]),
        ip_address(endpoint.removesuffix(f":{WIREGUARD_PORT}").strip("[]")) if endpoint else None,
        frozenset(map(ip_network, peer.get("allowed_ips") or [])),
        float((peer.get("persistent_keepalive") or "0").removesuffix("s")),
        peer.get("remove", False),
    )


def happen(event: dict[str, Any], peers: WireguardPeers, device: FakeDevice) -> str | None:
    try:
        match event["op"]:
            case "node_add" | "node_update" | "node_validate" | "update_peer":
                peers.upsert(node_of(event["node"]))
            case "node_delete":
                peers.delete(node_of(event["node"]).name)
            case "ipcache_upsert":
                host = event.get("host_ip")
                peers.prefix_upserted(ip_network(event["prefix"]), ip_address(host) if host else None)
            case "ipcache_delete":
                peers.prefix_upserted(ip_network(event["prefix"]), None)
            case "restore_finished":
                peers.restore_changed()
            case "inject_failure":
                device.fail_in = event["fail_in_calls"]
            case "device_gone":
                device.lost = True
            case other:
                raise AssertionError(other)
    except (PeerError, OSError) as error:
        return None if event["op"] in SWALLOWED else str(error)
    return None


def test_the_device_is_configured_as_recorded() -> None:
    cases = [json.loads(file.read_text()) for file in sorted(recordings("wireguard").glob("*.json"))]
    cases = [case for case in cases if case["kind"] == "events" and case["name"] not in DIFFERENT]
    assert len(cases) == 56
    wrong = []
    for case in cases:
        options = case["options"]
        before = {
            base64.b64decode(peer["public_key"]): set(map(ip_network, peer["allowed_ips"]))
            for peer in case.get("device_before", [])
        }
        device = FakeDevice(before)
        keepalive = float(options.get("wireguard-persistent-keepalive", "0").removesuffix("s"))
        families = frozenset(f for f in Family if options[f"enable-{f.value}"])
        peers = WireguardPeers(device, families, keepalive)
        for number, event in enumerate(case["events"]):
            device.calls.clear()
            error = happen(event, peers, device)
            calls, expected = device.calls, [call_of(each) for each in event["configure_device_calls"]]
            if event["op"] == "restore_finished":
                # Cilium's agent writes every peer again; one that the device has is left alone here.
                expected = sorted((one for one in expected if one.allowed or one.remove), key=str)
                calls = sorted(calls, key=str)
            after = {ip_address(a): n for a, n in event["node_by_ip_after"].items()}
            if (calls, error, dict(peers.node_by_ip)) != (expected, event.get("error"), after):
                wrong.append((case["name"], number, event["op"], calls, expected, error, event.get("error")))
                break
    assert not wrong, "\n".join(map(str, wrong))


def key(letter: str) -> str:
    return base64.b64encode(letter.encode() * 32).decode()


def test_an_address_that_moves_back_is_reached_through_its_first_node_again() -> None:
    device = FakeDevice({})
    peers = WireguardPeers(device, frozenset(Family))
    first, second = ip_address("192.0.2.1"), ip_address("192.0.2.2")
    peers.upsert(PeerNode("c/a", key("a"), {Family.IPV4: first}))
    peers.upsert(PeerNode("c/b", key("b"), {Family.IPV4: second}))
    pod = ip_network("10.0.0.1/32")
    for host, letter in ((first, b"a"), (second, b"b"), (first, b"a")):
        peers.prefix_upserted(pod, host)
        assert [name for name, allowed in device.table.items() if pod in allowed] == [letter * 32]


def test_nodes_that_swap_addresses_each_have_the_new_one() -> None:
    device = FakeDevice({})
    peers = WireguardPeers(device, frozenset(Family))
    for name, addresses in (("a", "12"), ("b", "21")):
        peers.upsert(PeerNode(f"c/{name}", key(name), {Family.IPV4: ip_address(f"192.0.2.{addresses[0]}")}))
    for name, addresses in (("a", "12"), ("b", "21")):
        peers.upsert(PeerNode(f"c/{name}", key(name), {Family.IPV4: ip_address(f"192.0.2.{addresses[1]}")}))
    assert device.table[b"a" * 32] == {ip_network("192.0.2.2/32")}
    assert device.table[b"b" * 32] == {ip_network("192.0.2.1/32")}


def test_another_node_can_have_a_key_that_its_node_has_changed() -> None:
    device = FakeDevice({})
    peers = WireguardPeers(device, frozenset(Family))
    peers.upsert(PeerNode("c/a", key("a"), {Family.IPV4: ip_address("192.0.2.1")}))
    peers.upsert(PeerNode("c/a", key("x"), {Family.IPV4: ip_address("192.0.2.1")}))
    peers.upsert(PeerNode("c/b", key("a"), {Family.IPV4: ip_address("192.0.2.2")}))
    assert set(device.table) == {b"x" * 32, b"a" * 32}


V4, V6 = ip_address("192.0.2.1"), ip_address("fd00::1")


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "tunnel", "addresses", "endpoint"),
    [
        (True, True, False, (V4, V6), V4),
        (False, True, False, (V4, V6), V6),
        (True, False, False, (V4, V6), V4),
        (False, True, True, (V4, V6), V4),
        (False, True, False, (V4,), V4),
        (True, False, False, (V6,), V6),
    ],
    ids=["dual stack", "IPv6", "IPv4", "IPv6 in tunnels", "IPv6 over IPv4", "IPv4 over IPv6"],
)
def test_encrypted_packets_go_to_a_nodes_address_of_an_enabled_family(
    ipv4: bool, ipv6: bool, tunnel: bool, addresses: tuple[IPAddress, ...], endpoint: IPAddress
) -> None:
    device: Any = FakeDevice({})
    agent = AgentConfig.__new__(AgentConfig)
    agent.ipv4, agent.ipv6 = ipv4, ipv6
    own_key: Any = SimpleNamespace(settings=EncryptionSettings(enable_wireguard=True))
    peers = wireguard_peers(own_key, device, agent, PodTunnel(tunnel))
    peers.upsert(PeerNode("c/a", key("a"), {Family.of(ip): ip for ip in addresses}))
    assert [call.endpoint for call in device.calls] == [endpoint]
    assert device.table == {b"a" * 32: set(map(ip_network, addresses))}
