"""Validates the addresses and ranges that nodes claim, before any user of the table ``nodes`` sees them.

A node must not claim reserved addresses, or addresses and ranges of this node or of an older node.

Why: routes, the tunnel and the ipcache follow CiliumNodes. A wrong or hostile one could take over this node's
     default route or networks, or other nodes' pods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, ClusterNode, NodeIP
from cells.kubernetes.object_events import EventDraft, EventSource, Regarding
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.node.devices import Device
from lifecycle import Change, Health, Jobs, Logger, Member, ReadTable, Table
from lifecycle.tables import Incremental, Input, Plan

_OURS: Final = "cilium_"
_LOOPBACK: Final = "lo"
_SHOWN: Final = 3
_MOST_RANGES: Final = 65_536
"""Maximum number of cached ranges, as those of removed nodes are not evicted."""
_SPECIAL: Final[tuple[IPNetwork, ...]] = tuple(
    map(ip_network, ("127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "::1/128", "fe80::/10", "ff00::/8"))
)
"""Loopback, link-local and multicast (RFC 6890)."""


class OwnNetworks(msgspec.Struct, frozen=True):
    """Addresses and networks of this node."""

    addresses: frozenset[IPAddress] = frozenset()
    connected: tuple[IPNetwork, ...] = ()
    """Networks of its devices."""
    ranges: tuple[IPNetwork, ...] = ()
    """Ranges of its pods."""
    routers_elsewhere: frozenset[Family] = frozenset(Family)
    """Families in which its router has no address, or one outside of these ranges."""


def own_networks(devices: Iterable[Device], local: ClusterNode | None) -> OwnNetworks:
    """This node's addresses and networks; ranges of pods are those from which it allocates."""
    found = [
        address
        for device in devices
        if device.name != _LOOPBACK and not device.name.startswith(_OURS)
        for address in device.addresses
    ]
    networks = {address.network for address in found if address.network.num_addresses > 1}
    own = {each.ip for each in local.addresses} if local is not None else set[IPAddress]()
    return OwnNetworks(
        frozenset(address.ip for address in found) | own,
        tuple(sorted(networks, key=str)),
        tuple(local.all_cidrs()) if local is not None else (),
        frozenset(family for family in Family if local is None or not _routed_from_range(local, family)),
    )


def _routed_from_range(node: ClusterNode, family: Family) -> bool:
    """Whether the router's address is in a range of the pods."""
    ip = node.router_ip(family)
    return ip is not None and any(ip in cidr for cidr in node.alloc_cidrs(family))


def without_refused_claims(
    nodes: Iterable[ClusterNode], devices: Iterable[Device], name: str
) -> dict[str, ClusterNode]:
    """Return the rows by ``cluster/name`` without refused claims; ``refused`` has those with reasons.

    ``name`` is this node: none of its claims is refused, but its ``unannounced`` has the ranges that routers
    must not send here. Of nodes with the same address or overlapping ranges, the oldest object wins.
    """
    rows = sorted(nodes, key=lambda node: (node.full_name != name, node.created or "~", node.full_name))
    own = own_networks(devices, next((node for node in rows if node.full_name == name), None))
    owner: dict[IPAddress, str] = {}
    reasons = range_reasons(own)
    checked = []
    for node in rows:
        if node.full_name == name:
            owner.update((each.ip, node.full_name) for each in node.addresses)
            checked.append(node)
        else:
            checked.append(_checked(node, own, owner, reasons))
    overlapping = set(_overlapping(checked))
    if overlapping:
        taken: list[tuple[IPNetwork, str]] = []
        first = [
            _without_overlaps(node, taken) if node.full_name in overlapping else node for node in checked
        ]
    else:
        first = checked
    ranges = _Ranges(first)
    found = {
        node.full_name: node if node.full_name == name else _check_router_and_health(node, own, owner, ranges)
        for node in first
    }
    if (local := found.get(name)) is not None:
        found[name] = _announced(local, devices, (node for node in rows if _age(node) < _age(local)))
    return found


def _age(node: ClusterNode) -> tuple[str, str]:
    """A sort key for nodes, oldest first."""
    return node.created or "~", node.full_name


def _announced(local: ClusterNode, devices: Iterable[Device], elder: Iterable[ClusterNode]) -> ClusterNode:
    """Return this node with its ``unannounced`` ranges: those that overlap other networks."""
    addresses = frozenset(each.ip for each in local.addresses if each.type != CILIUM_INTERNAL_IP)
    connected = own_networks(devices, None).connected
    own = OwnNetworks(addresses, tuple(one for one in connected if any(ip in one for ip in addresses)))
    reasons = range_reasons(own)
    others = [(cidr, node.full_name) for node in elder for cidr in node.all_cidrs() if not reasons[cidr]]
    found: dict[IPNetwork, str] = {}
    for cidr in local.all_cidrs():
        held = next((each for each in others if _overlap(cidr, each[0])), None)
        reason = reasons[cidr] or (f"overlaps {held[0]} of {held[1]}" if held else "")
        if reason:
            found[cidr] = f"range {cidr} {reason}: in use here, not announced"
    return (
        msgspec.structs.replace(local, refused=tuple(found.values()), unannounced=tuple(found))
        if found
        else local
    )


def _checked(
    node: ClusterNode, own: OwnNetworks, owner: dict[IPAddress, str], reasons: Mapping[IPNetwork, str]
) -> ClusterNode:
    """Return a node without claims that are invalid by themselves or held by this node; add its addresses to
    ``owner``.
    """
    refused: list[str] = []
    addresses: list[NodeIP] = []
    for each in node.addresses:
        reason = _wrong_address(each.ip, own) or _held_by_other(each.ip, node, owner)
        if each.type == CILIUM_INTERNAL_IP:  # checked after the ranges and addresses of all nodes
            addresses.append(each)
        elif reason:
            refused.append(f"address {each.ip} {reason}")
        else:
            owner[each.ip] = node.full_name
            addresses.append(each)
    ranges: dict[int, list[IPNetwork]] = {4: [], 6: []}
    for cidr in node.all_cidrs():
        if reason := reasons[cidr]:
            refused.append(f"range {cidr} {reason}")
        else:
            ranges[cidr.version].append(cidr)
    return _without(node, refused, addresses, ranges) if refused else node


def _without(
    node: ClusterNode,
    refused: Iterable[str],
    addresses: Iterable[NodeIP],
    ranges: Mapping[int, Iterable[IPNetwork]],
) -> ClusterNode:
    """Return the node with these addresses and ranges only."""
    return msgspec.structs.replace(
        node,
        addresses=tuple(addresses),
        ipv4_alloc_cidrs=tuple(ranges[4]),
        ipv6_alloc_cidrs=tuple(ranges[6]),
        refused=(*node.refused, *refused),
    )


def _wrong_address(ip: IPAddress, own: OwnNetworks) -> str:
    if ip.is_unspecified or any(ip in network for network in _SPECIAL if network.version == ip.version):
        return "is not an address of a node"
    return "is this node's own" if ip in own.addresses else ""


def _held_by_other(ip: IPAddress, node: ClusterNode, owner: Mapping[IPAddress, str]) -> str:
    held = owner.get(ip)
    return f"is that of {held}" if held is not None and held != node.full_name else ""


def impossible_range(cidr: IPNetwork) -> str:
    """Return why a range cannot be one of pods; empty if it can."""
    if not cidr.prefixlen:
        return "is every address"
    if any(_overlap(cidr, each) for each in _SPECIAL):
        return "has addresses that are no pod's (loopback, link-local, multicast)"
    return ""


class _RangeReasons(dict[IPNetwork, str]):
    """Caches why a range cannot be one of another node's pods; empty if it can.

    Each change of a node looks up the ranges of all nodes.
    """

    def __init__(self, own: OwnNetworks) -> None:
        super().__init__()
        self._own = own

    def __missing__(self, cidr: IPNetwork) -> str:
        if len(self) >= _MOST_RANGES:
            self.clear()
        found = self[cidr] = _wrong_range(cidr, self._own)
        return found


range_reasons = lru_cache(maxsize=4)(_RangeReasons)
"""Reasons why ranges conflict with this node's networks; cached by the networks."""


def _wrong_range(cidr: IPNetwork, own: OwnNetworks) -> str:
    if reason := impossible_range(cidr):
        return reason
    if held := next((ip for ip in own.addresses if ip.version == cidr.version and ip in cidr), None):
        return f"has this node's own address {held}"
    for what, networks in (("this node's network", own.connected), ("this node's pods", own.ranges)):
        if held_network := next((each for each in networks if _overlap(cidr, each)), None):
            return f"overlaps {held_network}, {what}"
    return ""


class _Ranges:
    """An index of pod ranges by address; ranges of nodes do not overlap."""

    def __init__(self, nodes: Iterable[ClusterNode]) -> None:
        self._by_length: dict[tuple[int, int], dict[int, str]] = {}
        """Nodes by (IP version, number of host bits) and network number."""
        for node in nodes:
            for cidr in node.all_cidrs():
                shift = cidr.max_prefixlen - cidr.prefixlen
                networks = self._by_length.setdefault((cidr.version, shift), {})
                networks[int(cidr.network_address) >> shift] = node.full_name

    def node_of(self, ip: IPAddress) -> str | None:
        number = int(ip)
        return next(
            (
                found
                for (version, shift), networks in self._by_length.items()
                if version == ip.version and (found := networks.get(number >> shift)) is not None
            ),
            None,
        )


def _check_router_and_health(
    node: ClusterNode, own: OwnNetworks, owner: dict[IPAddress, str], ranges: _Ranges
) -> ClusterNode:
    """Refuse addresses of router, health and ingress outside of the node's own ranges.

    If this node's own router is outside of its ranges (local-router-ipv4), those of others may be, too.
    """
    refused: list[str] = []

    def wrong(what: str, ip: IPAddress, *, anywhere: bool = False) -> bool:
        reason = _wrong_address(ip, own) or _held_by_other(ip, node, owner)
        holder = ranges.node_of(ip)
        if not reason and holder != node.full_name and not (anywhere and holder is None):
            reason = f"is in a range of {holder}" if holder is not None else "is in no range of its pods"
        if reason:
            refused.append(f"{what} address {ip} {reason}")
        else:
            owner[ip] = node.full_name
        return bool(reason)

    routers = {
        each
        for each in node.addresses
        if each.type == CILIUM_INTERNAL_IP
        and wrong("router", each.ip, anywhere=Family.of(each.ip) in own.routers_elsewhere)
    }
    health = tuple(ip for ip in node.health if not wrong("health", ip))
    ingress = tuple(ip for ip in node.ingress if not wrong("ingress", ip))
    if not refused:
        return node
    return msgspec.structs.replace(
        node,
        addresses=tuple(each for each in node.addresses if each not in routers),
        health=health,
        ingress=ingress,
        refused=(*node.refused, *refused),
    )


def _overlap(one: IPNetwork, other: IPNetwork) -> bool:
    if isinstance(one, IPv4Network) and isinstance(other, IPv4Network):
        return one.overlaps(other)
    return isinstance(one, IPv6Network) and isinstance(other, IPv6Network) and one.overlaps(other)


def _overlapping(nodes: Iterable[ClusterNode]) -> Iterator[str]:
    """Yield the nodes with ranges that overlap another node's."""
    rows = sorted(
        (cidr.version, int(cidr.network_address), cidr.prefixlen, int(cidr.broadcast_address), node.full_name)
        for node in nodes
        for cidr in node.all_cidrs()
    )
    open_: list[tuple[int, int, str]] = []
    for version, start, _, end, name in rows:
        while open_ and (open_[-1][0] != version or open_[-1][1] < start):
            open_.pop()
        for _, _, other in open_:
            if other != name:
                yield from (name, other)
        open_.append((version, end, name))


def _without_overlaps(node: ClusterNode, taken: list[tuple[IPNetwork, str]]) -> ClusterNode:
    """Refuse ranges that overlap ``taken`` ranges of earlier nodes; add all others to ``taken``."""
    refused: list[str] = []
    ranges: dict[int, list[IPNetwork]] = {4: [], 6: []}
    for cidr in node.all_cidrs():
        held = next((each for each in taken if each[1] != node.full_name and _overlap(cidr, each[0])), None)
        if held is not None:
            refused.append(f"range {cidr} overlaps {held[0]} of {held[1]}")
        else:
            ranges[cidr.version].append(cidr)
            taken.append((cidr, node.full_name))
    return _without(node, refused, node.addresses, ranges) if refused else node


CLAIMS: Final = "claims"
"""The index of claims that NodeGrants uses."""


def claims_of(node: ClusterNode) -> Iterator[IPAddress | IPNetwork]:
    """Yield the addresses and ranges that a node claims, without 0.0.0.0/0 and ::/0, which are always
    refused.
    """
    yield from (each.ip for each in node.addresses)
    yield from node.health
    yield from node.ingress
    yield from (cidr for cidr in node.all_cidrs() if cidr.prefixlen)


class NodeGrants:
    """Computes without_refused_claims() incrementally: only for nodes affected by changed claims.

    The result for a node depends on this node; on nodes with conflicting claims (the same address, an address
    in a range, overlapping ranges); on nodes with claims that conflict with theirs, and so on. A healthy
    cluster has no conflicts.
    """

    def __init__(self, claimed: ReadTable[str, ClusterNode], name: Callable[[], str]) -> None:
        """``claimed`` has the index CLAIMS; ``name`` returns the name of this node."""
        self._claimed = claimed
        self._name = name
        self._rows: dict[str, ClusterNode] = {}
        """The claims at the last computation."""
        self._this: tuple[ClusterNode | None, OwnNetworks, OwnNetworks] | None = None
        """This node and its networks at the last computation."""

    def table(self, devices: ReadTable[int, Device] | None) -> ReadTable[str, ClusterNode]:
        """Return the table ``nodes``."""
        sources = (self._claimed, devices) if devices is not None else (self._claimed,)
        return Incremental("nodes", self._plan, *sources, indexes={"address": _addresses})

    def _plan(
        self, _: str, claimed: Input[str, ClusterNode], devices: Input[int, Device] | None = None
    ) -> Plan[str, ClusterNode]:
        rows, changed = claimed.rows(), claimed.changed
        found = [row for row, _ in devices.rows().values()] if devices is not None else []
        name = self._name()
        local = rows[name][0] if name in rows else None
        own = own_networks(found, local)
        this = (local, own, own_networks(found, None))
        names = {*changed, *rows} if this != self._this else self._affected(changed, own, name)
        granted = without_refused_claims([rows[one][0] for one in {*names, name} if one in rows], found, name)

        def remember() -> None:
            self._this = this
            for key in changed:
                if key in rows:
                    self._rows[key] = rows[key][0]
                else:
                    self._rows.pop(key, None)

        return {one: granted.get(one) for one in names}, remember

    def _affected(self, changed: Iterable[str], own: OwnNetworks, name: str) -> set[str]:
        """Return changed nodes, and nodes with claims that conflict with their new or previous ones."""
        index, reasons = self._claimed.lpm(CLAIMS), range_reasons(own)
        found = set(changed)
        rest = [self._rows[key] for key in found if key in self._rows] + self._present(found)
        while rest:
            node = rest.pop()
            for claim in claims_of(node):
                if isinstance(claim, IPNetwork) and node.full_name != name and reasons[claim]:
                    met = self._present([name])  # always refused; but this node must not announce it
                else:
                    met = [*index.covering(claim), *index.within(claim)]
                new = {row.full_name: row for row in met if row.full_name not in found}
                rest += new.values()
                found |= new.keys()
        return found

    def _present(self, names: Iterable[str]) -> list[ClusterNode]:
        return [row for name in names if (row := self._claimed.get(name)) is not None]


def _addresses(node: ClusterNode) -> tuple[object, ...]:
    return tuple({each.ip for each in node.addresses})


def claim_events(
    nodes: ReadTable[str, ClusterNode], objects: Table[tuple[str, str], CiliumNode]
) -> Member[EventSource]:
    """Contribute events about refused claims of CiliumNodes; each node reports conflicts with itself."""

    def drafts(row: ClusterNode) -> Iterator[EventDraft]:
        for text in row.refused:
            held = objects.get(("", row.name))
            about = Regarding(CILIUM_NODES, row.name, uid=held.metadata.uid if held is not None else "")
            yield EventDraft(about, "ClaimRefused", text, "Route", shared=False)

    return EventSource("claims of nodes", nodes, drafts)


class RefusedClaims:
    """Reports refused claims: in the log when they change, and as health while they last."""

    def __init__(
        self, nodes: ReadTable[str, ClusterNode], *, jobs: Jobs, health: Health, log: Logger
    ) -> None:
        self._health = health.child("claims")
        self._log = log
        self._known: dict[str, tuple[str, ...]] = {}
        jobs.observe("refused claims", nodes.changes, self._follow)

    async def _follow(self, changes: Iterable[Change[str, ClusterNode]]) -> None:
        before = dict(self._known)
        for change in changes:
            name = change.key
            refused = change.row.refused if change.row is not None else ()
            if refused:
                self._known[name] = refused
            else:
                self._known.pop(name, None)
            for text in set(refused) - set(before.get(name, ())):
                self._log.warning("refusing an address or range of a node", node=name, claim=text)
        if not self._known:
            self._health.ok("no node claims addresses of others")
            return
        texts = [f"{name}: {text}" for name, several in sorted(self._known.items()) for text in several]
        more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        self._health.degraded(f"refused claims of nodes: {'; '.join(texts[:_SHOWN])}{more}")
