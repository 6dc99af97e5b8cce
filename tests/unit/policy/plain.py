"""A plain interpretation of policy rules, random packets, and the same rules in our engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any

from hypothesis import strategies as st

from cells.cluster.identity.identities import Identity
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy import PolicySettings
from cells.policy.compute.policies import NamedPodPort
from cells.policy.control import RulePolicy
from cells.policy.control.http_redirects import DNSProxyPort, HTTPRedirects
from cells.policy.control.objects import PodPorts
from cells.policy.labels import Prefix, prefix_labels
from cells.policy.maps import NodePolicy
from cells.policy.rules import PolicyOptions
from lifecycle.testing import fake

Rule = dict[str, Any]

NAMESPACE, CLUSTER = "k8s:io.kubernetes.pod.namespace", "k8s:io.cilium.k8s.policy.cluster=default"
PODS = {
    1001: {"app": "cart", "tier": "back"},
    1002: {"app": "shop", "tier": "front"},
    1003: {"app": "shop"},
    1004: {"app": "db", "tier": "back"},
}
"""All in one namespace, by identity."""
SUBJECT, STRANGER = 1001, 1009
RESERVED = {1: "host", 4: "health", 6: "remote-node", 8: "ingress"}
OUTSIDE = (
    *("192.0.2.1", "192.0.2.130", "192.0.3.1", "198.51.100.7", "10.0.0.1"),
    *("2001:db8::1", "2001:db8:1::1", "2001:db8:1:2::1", "fd00::1"),
)
WORLD = {4: 9, 6: 10}
"""Addresses outside all prefixes."""
EVERYBODY: tuple[int | str, ...] = (*PODS, STRANGER, *RESERVED, *OUTSIDE)
LABELS = {
    number: (CLUSTER, f"{NAMESPACE}=shop", *(f"k8s:{key}={value}" for key, value in own.items()))
    for number, own in PODS.items()
} | {STRANGER: (CLUSTER, f"{NAMESPACE}=other", "k8s:app=shop")}
AT = {1001: "192.0.2.130", 1002: "192.0.2.1", 1003: "2001:db8:1::1", 1004: "198.51.100.7"}
"""Addresses of pods, for the mode in which CIDR rules select pods, too."""
PREFIXES = (
    *("0.0.0.0/0", "192.0.0.0/16", "192.0.2.0/24"),
    *("192.0.2.128/25", "192.0.2.130/32", "198.51.100.0/24"),
    *("::/0", "2001:db8::/32", "2001:db8:1::/48", "2001:db8:1:2::1/128"),
)
TCP, UDP, ICMP, SCTP = 6, 17, 1, 132
PACKETS = [
    *product((TCP, UDP), (0, 1, 79, 80, 81, 443, 8191)),
    *((SCTP, 80), (ICMP, 8), (ICMP, 0), (47, 0)),
]
PROTOCOLS = {"TCP": (TCP,), "UDP": (UDP,), "SCTP": (SCTP,), "ANY": (TCP, UDP, SCTP)}
WEB = 443
"""The TCP port that all pods name web."""
ENTITIES = ("all", "world", "cluster", "host", "remote-node", "health", "ingress")
CLUSTERS = {"host", "remote-node", "health", "ingress"}

pod_selectors = st.sampled_from(
    [
        {},
        {"matchLabels": {"app": "shop"}},
        {"matchLabels": {"app": "db", "tier": "back"}},
        {"matchLabels": {"app": "nobody"}},
        {"matchExpressions": [{"key": "app", "operator": "In", "values": ["cart", "db"]}]},
        {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["shop"]}]},
        {"matchExpressions": [{"key": "tier", "operator": "Exists"}]},
        {"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]},
    ]
)
cidr_sets = st.sampled_from(
    [
        {"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]},
        {"cidr": "192.0.0.0/16", "except": ["192.0.2.0/24"]},
        {"cidr": "0.0.0.0/0", "except": ["192.0.0.0/16", "198.51.100.0/24"]},
        {"cidr": "2001:db8::/32", "except": ["2001:db8:1::/48"]},
        {"cidr": "::/0", "except": ["2001:db8:1:2::1/128"]},
    ]
)
peers: st.SearchStrategy[Rule] = st.one_of(
    st.just({}),
    st.lists(pod_selectors, max_size=2).map(lambda some: {"Endpoints": some}),
    st.lists(st.sampled_from(PREFIXES), max_size=2).map(lambda some: {"CIDR": some}),
    st.lists(cidr_sets, min_size=1, max_size=2).map(lambda some: {"CIDRSet": some}),
    st.lists(st.sampled_from(ENTITIES), max_size=2).map(lambda some: {"Entities": some}),
)
port = st.one_of(
    st.sampled_from(("TCP", "UDP", "ANY")).map(lambda protocol: {"port": "web", "protocol": protocol}),
    st.builds(
        lambda number, protocol: {"port": str(number), "protocol": protocol},
        st.sampled_from((0, 1, 80, 81, 443)),
        st.sampled_from(sorted(PROTOCOLS)),
    ),
    st.builds(
        lambda first, more, protocol: {
            "port": str(first),
            "endPort": min(65535, first + more),
            "protocol": protocol,
        },
        st.sampled_from((1, 79, 80, 4096)),
        st.sampled_from((1, 7, 362, 61439)),
        st.sampled_from(("TCP", "UDP", "ANY")),
    ),
)
ports = st.one_of(
    st.just({}),
    st.lists(port, min_size=1, max_size=3).map(lambda some: {"toPorts": [{"ports": some}]}),
    st.sampled_from((0, 8)).map(lambda kind: {"icmps": [{"fields": [{"family": "IPv4", "type": kind}]}]}),
)


def rule(direction: str) -> st.SearchStrategy[Rule]:
    way = "from" if direction == "ingress" else "to"
    return st.builds(lambda who, what: {f"{way}{key}": one for key, one in who.items()} | what, peers, ports)


def section(direction: str) -> st.SearchStrategy[dict[str, Any]]:
    some = st.lists(rule(direction), max_size=3)
    return st.builds(
        lambda allows, denies, closed: {
            **({direction: allows} if allows is not None else {}),
            **({f"{direction}Deny": denies} if denies else {}),
            **({"enableDefaultDeny": {direction: closed}} if closed is not None else {}),
        },
        st.none() | some,
        some,
        st.sampled_from((None, None, True, False)),
    ).filter(lambda made: direction in made or f"{direction}Deny" in made)


specs = st.lists(st.sampled_from(("ingress", "egress")).flatmap(section), min_size=1, max_size=3)


# As one reads it


def reads(
    specs: list[dict[str, Any]],
    direction: str,
    peer: int | str,
    packet: tuple[int, int],
    *,
    may_leave_open: bool = True,
    address: str = "",
) -> bool:
    """Return whether the rules allow a packet between the subject and a peer: an identity or an address.

    ``address``: the identity's, where CIDR rules select pods, too.
    """
    closed = False
    verdicts = set()
    for spec in specs:
        allows, denies = spec.get(direction) or [], spec.get(f"{direction}Deny") or []
        asked = spec.get("enableDefaultDeny", {}).get(direction)
        if allows or denies:
            closed |= asked is not False or not may_leave_open
        verdicts |= {
            deny
            for deny, some in ((False, allows), (True, denies))
            for one in some
            if speaks(one, peer, packet, address)
        }
    if True in verdicts:
        return False
    if (direction, peer) == ("ingress", 1):
        return True  # allow-localhost
    return not closed or False in verdicts


def speaks(rule: Rule, peer: int | str, packet: tuple[int, int], address: str = "") -> bool:
    who = {key: one for key, one in rule.items() if key not in ("toPorts", "icmps")}
    what = {key: one for key, one in rule.items() if key in ("toPorts", "icmps")}
    if not who and not what:
        return False
    return all(
        any(is_meant(key.removeprefix("from").removeprefix("to"), one, peer, address) for one in some)
        for key, some in who.items()
    ) and (not what or any(matches(what, packet)))


def is_meant(kind: str, one: Any, peer: int | str, address: str = "") -> bool:
    if address and kind in ("CIDR", "CIDRSet"):
        return is_meant(kind, one, address)
    if kind == "Endpoints":
        return isinstance(peer, int) and peer in PODS and selects(one, PODS[peer])
    if kind == "Entities":
        return is_entity(one, peer)
    if isinstance(peer, int):
        return False
    if kind == "CIDR":
        return ip_address(peer) in ip_network(one)
    return ip_address(peer) in ip_network(one["cidr"]) and not any(
        ip_address(peer) in ip_network(other) for other in one["except"]
    )


def is_entity(entity: str, peer: int | str) -> bool:
    if entity == "all":
        return True
    if isinstance(peer, str):
        return entity == "world"
    name = RESERVED.get(peer, "pod")
    return name == entity or (entity == "cluster" and (name in CLUSTERS or peer in PODS or peer == STRANGER))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for one in selector.get("matchExpressions", ()):
        value, values = labels.get(one["key"]), one.get("values", ())
        held = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not held[one["operator"]]:
            return False
    return True


def matches(what: Rule, packet: tuple[int, int]) -> Iterator[bool]:
    protocol, number = packet
    for entry in what.get("toPorts", ()):
        for one in entry["ports"]:
            if one["port"] == "web":
                yield packet == (TCP, WEB) and one["protocol"] != "UDP"
                continue
            first, last = int(one["port"]), one.get("endPort", int(one["port"]))
            yield protocol in PROTOCOLS[one["protocol"]] and (first == 0 or first <= number <= last)
    for entry in what.get("icmps", ()):
        for one in entry["fields"]:
            yield protocol == ICMP and number == one["type"]


# As the datapath does


Indexed = dict[tuple[int, bool], list[tuple[PolicyKey, PolicyEntry]]]
NOTHING = PolicyEntry(deny=True)


def indexed(entries: Mapping[PolicyKey, PolicyEntry]) -> Indexed:
    """Return the entries by identity and direction, the most specific first."""
    found: Indexed = {}
    for key, entry in entries.items():
        found.setdefault((key.identity, key.egress), []).append((key, entry))
    for some in found.values():
        some.sort(key=lambda one: (one[0].protocol > 0, one[0].port_bits), reverse=True)
    return found


def decides(entries: Indexed, identity: int, egress: bool, packet: tuple[int, int]) -> bool:
    return not decisive(entries, identity, egress, packet).deny


def decisive(entries: Indexed, identity: int, egress: bool, packet: tuple[int, int]) -> PolicyEntry:
    """Return the entry that the datapath finds."""
    protocol, number = packet
    ways = []
    for which in (identity, 0):
        best = -1, NOTHING
        for key, entry in entries.get((which, egress), ()):
            if key.protocol in (0, protocol) and not (number ^ key.port) >> (16 - key.port_bits):
                best = (8 + key.port_bits if key.protocol else 0), entry
                break
        ways.append(best)
    for least, (bits, entry) in product((9, 8, 0), ways):
        if bits >= least:
            return entry
    return NOTHING


def world_of(
    specs: list[dict[str, Any]],
    requests: HTTPRedirects | None = None,
    names: DNSProxyPort | None = None,
    *,
    may_leave_open: bool = True,
) -> tuple[RulePolicy, dict[Prefix, int]]:
    """Return the specs in force, and the identities of their prefixes."""
    own = frozenset({NamedPodPort("web", TCP, WEB)})
    ports = fake(PodPorts, of=lambda pod: own)
    options = PolicyOptions(enable_ipv6=True, enable_non_default_deny_policies=may_leave_open)
    world = RulePolicy(NodePolicy(PolicySettings()), options, None, ports, names, requests)
    world.follow_ports(own)
    world.update_identities(Identity(number, tuple(sorted(some))) for number, some in LABELS.items())
    for number, spec in enumerate(specs):
        body = {"endpointSelector": {"matchLabels": {"app": "cart"}}, **spec}
        metadata = {"name": f"p{number}", "namespace": "shop"}
        world.apply({"kind": "CiliumNetworkPolicy", "metadata": metadata, "spec": body})
    prefixes: dict[Prefix, int] = {
        prefix: (1 << 24) + number for number, prefix in enumerate(world.prefixes, 1) if prefix.prefixlen
    }
    world.update_identities(
        Identity(number, tuple(sorted(map(str, prefix_labels(prefix, dual_stack=True)))))
        for prefix, number in prefixes.items()
    )
    return world, prefixes


def identity_of(peer: int | str, prefixes: Mapping[Prefix, int]) -> int:
    """Look up an address in the ipcache."""
    if isinstance(peer, int):
        return peer
    around = [one for one in prefixes if ip_address(peer) in one]
    return prefixes[max(around, key=lambda one: one.prefixlen)] if around else WORLD[ip_address(peer).version]
