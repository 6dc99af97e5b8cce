"""The agent killed before writes of a policy change: flows have the verdict of one of both policies.

Verdicts are computed as by the datapath: identities from the ipcache, verdicts from the policy map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.node.agent.manifests import pod, write
from tests.support.agents import serving
from tests.support.crash.drill import POINTS, Drill, chosen
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(300 if POINTS else 7200)]

GLOBALS = Path("/sys/fs/bpf/tc/globals")
NUMBERS = Path("/var/run/cilium/state/local_allocator_state.json")
SETTINGS = ("--enable-l7-proxy=false",)  # Envoy is another process, and its calls are not the agent's
TCP, UDP = 6, 17
PORTS = ((TCP, 80), (TCP, 443), (TCP, 8080), (TCP, 8085), (UDP, 53), (UDP, 80))
OUTSIDE = ("192.0.2.1", "192.0.2.130", "198.51.100.7", "203.0.113.9")
NAMES = ("server", "client", "other")

Flow = tuple[str, bool, str, int, int]
"""Pod, whether it sends, peer, protocol, port."""


def policy(name: str, kind: str = "CiliumNetworkPolicy", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": "default"} if kind == "CiliumNetworkPolicy" else {})
    body = {"endpointSelector": {"matchLabels": {"app": "server"}}, **spec}
    return {"apiVersion": "cilium.io/v2", "kind": kind, "metadata": metadata, "spec": body}


def ports(*numbers: str, end: int = 0, protocol: str = "TCP") -> list[dict[str, Any]]:
    more = {"endPort": end} if end else {}
    return [{"ports": [{"port": one, "protocol": protocol, **more} for one in numbers]}]


def app(name: str) -> list[dict[str, Any]]:
    return [{"matchLabels": {"app": name}}]


BEFORE = [
    policy(
        "mixed",
        ingress=[
            {"fromEndpoints": app("client")},
            {"fromCIDR": ["192.0.2.0/24"], "toPorts": ports("80", "443")},
            {"toPorts": ports("8080", end=8095)},
        ],
        ingressDeny=[{"fromEndpoints": app("other"), "toPorts": ports("8085")}],
        egress=[{"toEntities": ["world"]}, {"toEndpoints": app("client"), "toPorts": ports("80")}],
        egressDeny=[{"toCIDR": ["198.51.100.0/24"]}],
    ),
    policy("gone", "CiliumClusterwideNetworkPolicy", ingress=[{"fromCIDR": ["203.0.113.0/24"]}]),
]
AFTER = [
    policy(
        "mixed",
        ingress=[
            {"fromEndpoints": app("client"), "toPorts": ports("80")},
            {"fromCIDRSet": [{"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]}], "toPorts": ports("80")},
            {"fromEndpoints": app("other")},
        ],
        ingressDeny=[{"toPorts": ports("443")}, {"fromEndpoints": app("client"), "toPorts": ports("8080")}],
        egress=[{"toCIDR": ["198.51.100.0/24", "192.0.2.0/25"]}, {"toEndpoints": app("other")}],
        egressDeny=[{"toPorts": ports("53", protocol="UDP")}],
    ),
    policy("new", "CiliumClusterwideNetworkPolicy", egress=[{"toCIDR": ["203.0.113.0/24"]}]),
]


@pytest.fixture
def drill(node: Lab, tmp_path: Path) -> Iterator[Drill]:
    drill = Drill(node, tmp_path)
    yield drill
    drill.close()


def decide(
    entries: Mapping[PolicyKey, PolicyEntry], packet: tuple[int, bool, int, int]
) -> PolicyEntry | None:
    """The entry that the datapath finds for a peer, a direction, a protocol and a port."""
    identity, egress, protocol, port = packet

    def best(number: int) -> tuple[int, PolicyEntry | None]:
        found: tuple[int, PolicyEntry | None] = -1, None
        for key, entry in entries.items():
            bits = 8 + key.port_bits if key.protocol else 0
            if (key.identity, key.egress) != (number, egress) or (key.protocol and key.protocol != protocol):
                continue
            if (port ^ key.port) >> (16 - key.port_bits) == 0 and bits > found[0]:
                found = bits, entry
        return found

    own, anybody = best(identity), best(0)
    for least, (bits, entry) in product((9, 8, 0), (own, anybody)):
        if bits >= least:
            return entry
    return None


def allowed(ids: Mapping[str, int], peers: Mapping[str, str]) -> frozenset[Flow]:
    """What the kernel's maps let through now, of the pods with these endpoint numbers."""
    with open_map(GLOBALS / "cilium_ipcache") as table:
        known = [
            (IpcacheKey.unpack(key).network, IpcacheValue.unpack(value).identity)
            for key, value in table.items()
        ]
    owner = {}
    for peer in peers.values():
        around = [(net.prefixlen, number) for net, number in known if ip_address(peer) in net]
        owner[peer] = max(around)[1] if around else 2
    found = set()
    for name, number in ids.items():
        with open_map(GLOBALS / f"cilium_policy_{number:05}") as table:
            entries = {PolicyKey.unpack(key): PolicyEntry.unpack(value) for key, value in table.items()}
        for egress, (peer, address), (protocol, port) in product((False, True), peers.items(), PORTS):
            entry = decide(entries, (owner[address], egress, protocol, port))
            if entry is not None and not entry.deny:
                found.add((name, egress, peer, protocol, port))
    return frozenset(found)


def has_row(prefix: str) -> bool:
    """Whether the ipcache has one for this very prefix."""
    with open_map(GLOBALS / "cilium_ipcache") as table:
        return any(IpcacheKey.unpack(key).network == ip_network(prefix) for key, _ in table.items())


def meant(objects: list[dict[str, Any]], peers: Mapping[str, str]) -> frozenset[Flow]:
    """What these policies allow, read plainly: a deny that matches denies, else an allow allows."""
    found = set()
    for name, egress, peer, packet in product(NAMES, (False, True), peers, PORTS):
        way = "egress" if egress else "ingress"
        specs = [one["spec"] for one in objects] if name == "server" else []

        def matching(key: str, specs: list[Any] = specs, peer: str = peer, packet: Any = packet) -> bool:
            rules = (rule for spec in specs for rule in spec.get(key, ()))
            return any(speaks_of(rule, peer, peers[peer]) and names(rule, *packet) for rule in rules)

        open_ = not any(key in spec for spec in specs for key in (way, f"{way}Deny"))
        if open_ or (matching(way) and not matching(f"{way}Deny")):
            found.add((name, egress, peer, *packet))
    return frozenset(found)


def speaks_of(rule: Mapping[str, Any], peer: str, address: str) -> bool:
    """Whether a rule is about the peer."""
    way = "to" if any(key in rule for key in ("toEndpoints", "toCIDR", "toEntities")) else "from"
    outside, ip = peer in OUTSIDE, ip_address(address)
    spoken = {key.removeprefix(way): value for key, value in rule.items() if key != "toPorts"}
    if not spoken:
        return True
    ((kind, values),) = spoken.items()
    match kind:
        case "Endpoints":
            return bool(values == app(peer))
        case "Entities":
            return outside
        case "CIDR":
            return outside and any(ip in ip_network(one) for one in values)
    return outside and any(
        ip in ip_network(one["cidr"]) and not any(ip in ip_network(other) for other in one["except"])
        for one in values
    )


def names(rule: Mapping[str, Any], protocol: int, port: int) -> bool:
    """Whether a rule is about the port."""
    spoken = [one for entry in rule.get("toPorts", ()) for one in entry["ports"]]
    return not spoken or any(
        {"TCP": TCP, "UDP": UDP}[one["protocol"]] == protocol
        and int(one["port"]) <= port <= one.get("endPort", int(one["port"]))
        for one in spoken
    )


class Change:
    """A node with pods, and rules that are BEFORE or AFTER."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        folder.mkdir()
        self._lab, self._folder = lab, folder
        write(folder, "pods", *(pod(name, {"app": name}) for name in NAMES))
        self.settings = (f"--manifests-dir={folder}", *SETTINGS)
        pid = serving(lab, *self.settings)
        self._peers = {name: pods.add(lab, name).ipv4 for name in NAMES} | {one: one for one in OUTSIDE}
        self._ids = {
            one["status"]["external-identifiers"]["k8s-pod-name"]: one["id"]
            for one in ask("/v1/endpoint", api_socket(pid))
        }
        agent_process.crash(lab)
        self.before, self.after = (meant(objects, self._peers) for objects in (BEFORE, AFTER))
        assert self.before - self.after, "the change takes something away"
        assert self.after - self.before, "and gives something"

    def flows(self) -> frozenset[Flow]:
        with self._lab.open() as node:
            return node.run(allowed, self._ids, self._peers)

    def knows_nothing_new(self) -> bool:
        with self._lab.open() as node:
            return not node.run(has_row, "192.0.2.0/25")

    def forget_numbers(self) -> None:
        """Remove what agents saved of the identities of prefixes."""
        with self._lab.open() as node:
            node.run(NUMBERS.unlink, True)

    def write(self, objects: list[dict[str, Any]]) -> None:
        write(self._folder, "policies", *objects)

    def comes_to(self, wanted: frozenset[Flow], *, forgets_the_new: bool = False) -> None:
        """Wait until the flows are these. Raises AssertionError with what differs, and the end of the log."""
        try:
            eventually(
                lambda: self.flows() == wanted and (not forgets_the_new or self.knows_nothing_new()), 60
            )
        except AssertionError as error:
            flows = self.flows()
            more, less = sorted(flows - wanted), sorted(wanted - flows)
            log = agent_process.log_end(self._lab, 60)
            raise AssertionError(f"too many flows: {more}; too few: {less}; the agent:\n{log}") from error

    def keeps_to_both(self) -> None:
        left = self.flows()
        assert left - self.before - self.after == set(), "neither policy allows it"
        assert (self.before & self.after) - left == set(), "both allow it"


@pytest.mark.parametrize("saved", [True, False], ids=["identities saved", "killed before they were saved"])
def test_a_start_with_other_rules_allows_and_refuses_nothing_else(
    drill: Drill, tmp_path: Path, saved: bool
) -> None:
    lab, change = drill.lab, Change(drill.lab, tmp_path / "objects")

    def begin() -> None:
        """An agent with the earlier rules that has never seen the new ones."""
        change.write(BEFORE)
        for _ in range(2):
            serving(lab, *change.settings)
            change.comes_to(change.before, forgets_the_new=True)
            agent_process.crash(lab)
        if not saved:
            change.forget_numbers()
        change.write(AFTER)

    begin()
    calls = drill.record_start(*change.settings)
    for number in chosen("policies at the start", len(calls) // 2, len(calls)):
        begin()
        drill.cut_start(number, len(calls), *change.settings)
        change.keeps_to_both()
        serving(lab, *change.settings)
        change.comes_to(change.after)
        agent_process.crash(lab)


def test_between_two_policies_nothing_else_is_allowed_or_refused(drill: Drill, tmp_path: Path) -> None:
    lab, change = drill.lab, Change(drill.lab, tmp_path / "objects")
    settings, before, after = change.settings, change.before, change.after
    change.write(BEFORE)
    drill.start(*settings)
    change.comes_to(before)
    at_rest = drill.made
    change.write(AFTER)
    change.comes_to(after)
    calls = drill.counted_lines[at_rest : drill.made]
    agent_process.crash(lab)
    assert any("BPF" in call.upper() for call in calls), "a change that writes no map is none"
    for number in chosen("policies", 1, len(calls)):
        change.write(BEFORE)
        drill.start(*settings)
        change.comes_to(before)
        if number <= len(calls):
            drill.cut_after(number)
        change.write(AFTER)
        if number <= len(calls):
            drill.expect_cut()
        else:
            change.comes_to(after)
            agent_process.crash(lab)
        change.keeps_to_both()
        serving(lab, *settings)
        change.comes_to(after)
        agent_process.crash(lab)
