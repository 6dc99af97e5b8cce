"""Plans the XFRM states, policies and routes between this node and all others, and writes them to the kernel.

States of a previous key stay until no node uses that key.

Why:    the kernel encrypts a packet with a node's mark, by the policy and the state with that mark, and
        decrypts one by the mark of the sending node. A marked packet without a policy is blocked.
Source: Cilium 1.17, pkg/datapath/linux (ipsec.go, node.go) and its marks; RFC 4301.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from socket import AF_INET, AF_INET6
from typing import Final, Protocol

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.nodes.node import ClusterNode
from cells.encryption.ipsec.keys import IpsecKey, KeyRing
from cells.netlink.connection import NetlinkError
from cells.netlink.network import FwmarkRule, FwmarkRuleRow, TableRoute
from cells.netlink.xfrm import (
    REQUEST_ID,
    Direction,
    XfrmMark,
    XfrmPolicy,
    XfrmState,
    XfrmTemplate,
)
from cells.node.addresses import HOST_DEVICE
from cells.node.devices import Device
from cells.tunnel.settings import RouteMtu
from lifecycle import BatchError, HiveError, Target

__all__ = [
    "DECRYPT",
    "ENCRYPT",
    "FAMILIES",
    "KIND",
    "RULES",
    "TABLE",
    "IpsecMode",
    "IpsecPlan",
    "IpsecPlanner",
    "IpsecRoutes",
    "Refusals",
    "XfrmEdge",
    "XfrmKey",
    "XfrmObject",
    "XfrmTarget",
    "blocks",
    "is_ours",
    "node_of",
    "spi_of",
    "wanted_routes",
]

ENCRYPT: Final = 0xE00
DECRYPT: Final = 0xD00
KIND: Final = 0xF00
_NODE_AND_SPI: Final = 0xFFFFFF00
_NODE: Final = 0xFFFF0F00
_FORWARD_PRIORITY: Final = 2975
_BLOCK_PRIORITY: Final = 100
EVERYTHING: Final = {Family.IPV4: ip_network("0.0.0.0/0"), Family.IPV6: ip_network("::/0")}
_ANY_STATE: Final = (XfrmTemplate(optional=True),)


class IpsecMode(msgspec.Struct, frozen=True, kw_only=True):
    """The routing mode, as far as it determines the states."""

    families: tuple[Family, ...]
    tunnel: bool = False
    """VXLAN: then the nodes' own IPv4 addresses also have states."""
    subnets: Mapping[Family, tuple[IPNetwork, ...]] = {}
    """Ranges that the pods of all nodes share, if nodes have no ranges of their own (ENI, Azure)."""
    interface: Mapping[Family, IPAddress] = {}
    """With subnets: the addresses of the encrypting interface."""
    between_routers: bool = False
    """With subnets: encrypt between the routers' addresses instead of the nodes'."""
    endpoint_routes: bool = False


class IpsecPlan(msgspec.Struct, frozen=True):
    """The desired objects in order of creation, and the nodes that stay unchanged."""

    states: tuple[XfrmState, ...]
    policies: tuple[XfrmPolicy, ...]
    nodes: frozenset[int] = frozenset()
    """Ids of the nodes in the plan."""
    held: frozenset[int] = frozenset()
    """Ids of nodes without a known boot ID at present: their states and policies stay."""

    @property
    def objects(self) -> Iterator[XfrmState | XfrmPolicy]:
        """All objects, states first."""
        yield from self.states
        yield from self.policies


def node_of(mark: XfrmMark) -> int:
    """The node id in a mark; 0: none."""
    return mark.value >> 16


def spi_of(policy: XfrmPolicy) -> int:
    """The SPI of the packets that a policy encrypts; 0: none."""
    if policy.mark is None or policy.mark.mask != _NODE_AND_SPI:
        return 0
    return policy.mark.value >> 12 & 0xF


def is_ours(one: XfrmState | XfrmPolicy) -> bool:
    """Whether such states and policies are made by this agent or Cilium's: all others are ignored."""
    if isinstance(one, XfrmState):
        kinds = {(ENCRYPT, _NODE_AND_SPI), (DECRYPT, _NODE)}
        return (one.mark.value & KIND, one.mark.mask) in kinds
    if one.direction is Direction.OUT and one.mark is not None:
        return (one.mark.value & KIND, one.mark.mask) == (ENCRYPT, _NODE_AND_SPI) or one in _BLOCKS
    return one in _SHARED


def blocks(families: Iterable[Family]) -> list[XfrmPolicy]:
    """The policies that block marked packets without any other policy."""
    return [_block(family) for family in families]


class IpsecPlanner:
    """Plans for this node; recomputes a node only if that node, this node or the key has changed."""

    def __init__(self, mode: IpsecMode) -> None:
        self._mode = mode
        self._made: dict[str, tuple[object, tuple[XfrmState | XfrmPolicy, ...]]] = {}
        """By name of the node: inputs and results."""

    def plan(
        self,
        local: ClusterNode | None,
        others: Iterable[ClusterNode],
        numbers: Mapping[str, int],
        key: IpsecKey | None,
    ) -> IpsecPlan:
        """States and policies between ``local`` and the others.

        ``numbers``: node ids by ``cluster/name``.

        A node without id or address has none; packets marked for it are blocked. While this node or its key
        is unknown, all marked packets are blocked, and existing objects stay.
        """
        policies = {one.key: one for one in blocks(self._mode.families)}
        states: dict[object, XfrmState] = {}
        known, held = set(), set()
        before, self._made = self._made, {}
        for node in sorted(others, key=lambda one: one.full_name):
            number = numbers.get(node.full_name, 0)
            if not number or node.local:
                continue
            known.add(number)
            if local is None or key is None or not node.boot_id or not local.boot_id:
                held.add(number)
                continue
            follows = (local.addresses, local.boot_id, node, number, key)
            was = before.get(node.full_name)
            if was is None or was[0] != follows:
                pair = _Pair(local, node, number, key, self._mode)
                was = follows, tuple(one for family in self._mode.families for one in pair.of(family))
            self._made[node.full_name] = was
            for one in was[1]:
                if isinstance(one, XfrmPolicy):
                    policies[one.key] = one
                else:
                    states.setdefault(one.key, one)
        return IpsecPlan(tuple(states.values()), tuple(policies.values()), frozenset(known), frozenset(held))


class _Pair:
    """This node and another."""

    def __init__(
        self, local: ClusterNode, remote: ClusterNode, number: int, key: IpsecKey, mode: IpsecMode
    ) -> None:
        self._local, self._remote, self._key, self._mode = local, remote, key, mode
        self._out = XfrmMark(number << 16 | key.spi << 12 | ENCRYPT, _NODE_AND_SPI)
        self._in = XfrmMark(number << 16 | DECRYPT, _NODE)

    def of(self, family: Family) -> Iterator[XfrmState | XfrmPolicy]:
        """States and policies of one family."""
        mode = self._mode
        own, other = self._local.router_ip(family), self._remote.router_ip(family)
        own_node, other_node = self._local.node_ip(family), self._remote.node_ip(family)
        everything = EVERYTHING[family]
        if mode.subnets:
            inside = mode.interface.get(family) or own_node
            way = (own, other) if mode.between_routers else (inside, other_node)
            yield from self._encrypted(everything, mode.subnets.get(family, ()), *way)
            yield from self._decrypted(own, other)
            yield from self._decrypted(inside, other_node)
            return
        ranges = self._remote.alloc_cidrs(family)
        if other is None or not ranges:
            return
        yield from self._encrypted(everything, ranges, own, other)
        yield from self._decrypted(own, other)
        if mode.tunnel and family is Family.IPV4 and own_node is not None and other_node is not None:
            alone = (ip_network(own_node), (ip_network(other_node),))
            yield from self._encrypted(*alone, own_node, other_node)
            yield from self._decrypted(own_node, other_node)

    def _encrypted(
        self,
        source: IPNetwork,
        destinations: Iterable[IPNetwork],
        own: IPAddress | None,
        other: IPAddress | None,
    ) -> Iterator[XfrmState | XfrmPolicy]:
        """To another node: a state, and a policy for each of its networks."""
        if own is None or other is None or own == other:
            return
        keys = self._key.between(own, other, self._local.boot_id, self._remote.boot_id)
        yield _state(own, other, keys, self._out, XfrmMark(ENCRYPT, _NODE_AND_SPI))
        template = XfrmTemplate(own, other, keys.spi, REQUEST_ID)
        for each in destinations:
            yield XfrmPolicy(
                direction=Direction.OUT,
                source=source,
                destination=each,
                mark=self._out,
                templates=(template,),
            )

    def _decrypted(self, own: IPAddress | None, other: IPAddress | None) -> Iterator[XfrmState | XfrmPolicy]:
        """From another node: a state, and the policies that accept decrypted and clear packets."""
        if own is None or other is None or own == other:
            return
        keys = self._key.between(other, own, self._remote.boot_id, self._local.boot_id)
        unmarked = bool(self._mode.subnets) and self._mode.endpoint_routes
        yield _state(other, own, keys, self._in, XfrmMark(0 if unmarked else DECRYPT, _NODE_AND_SPI))
        yield from (_shared(direction, Family.of(own)) for direction in (Direction.FWD, Direction.IN))


def _state(
    source: IPAddress, destination: IPAddress, keys: IpsecKey, mark: XfrmMark, output: XfrmMark
) -> XfrmState:
    return XfrmState(
        source=source,
        destination=destination,
        spi=keys.spi,
        mark=mark,
        output_mark=output,
        aead=keys.aead,
        auth=keys.auth,
        crypt=keys.crypt,
    )


def _shared(direction: Direction, family: Family) -> XfrmPolicy:
    return XfrmPolicy(
        direction=direction,
        source=EVERYTHING[family],
        destination=EVERYTHING[family],
        priority=_FORWARD_PRIORITY if direction is Direction.FWD else 0,
        templates=_ANY_STATE,
    )


def _block(family: Family) -> XfrmPolicy:
    return XfrmPolicy(
        direction=Direction.OUT,
        source=EVERYTHING[family],
        destination=EVERYTHING[family],
        mark=XfrmMark(ENCRYPT, KIND),
        priority=_BLOCK_PRIORITY,
        block=True,
    )


_BLOCKS: Final = tuple(_block(family) for family in Family)
_SHARED: Final = tuple(
    _shared(direction, family) for direction in (Direction.FWD, Direction.IN) for family in Family
)


# XFRM made equal to the plan.

XfrmObject = XfrmState | XfrmPolicy
XfrmKey = tuple[object, ...]
Refusals = Mapping[FwmarkRuleRow | TableRoute, NetlinkError]


class XfrmEdge(Protocol):
    """The kernel's states and policies, and the routing table of marked packets.

    Lists raise NetlinkError, as remove_routes() does; other methods return what was refused.
    """

    async def states(self) -> list[XfrmState]: ...

    async def policies(self) -> list[XfrmPolicy]: ...

    async def add_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]: ...

    async def delete_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]: ...

    async def set_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]: ...

    async def delete_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]: ...

    async def rows(self) -> list[FwmarkRuleRow | TableRoute]: ...

    async def set_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals: ...

    async def remove_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals: ...

    async def remove_routes(self) -> int: ...


class XfrmTarget:
    """XFRM as a reconciler's target. Ignores objects of others and those that must stay for a while.

    States precede the policies that need them: a policy without its state blocks packets.
    """

    def __init__(self, kernel: XfrmEdge, ring: KeyRing, planned: Callable[[], IpsecPlan]) -> None:
        self._kernel = kernel
        self._ring = ring
        self._planned = planned
        self._there: dict[XfrmKey, XfrmObject] = {}

    async def observe(self) -> Mapping[XfrmKey, XfrmObject]:
        """Our objects that are planned or must be removed. Raises NetlinkError."""
        found: list[XfrmObject] = [*await self._kernel.states(), *await self._kernel.policies()]
        self._there = {one.key: one for one in found if is_ours(one)}
        planned = self._planned()
        keys = {one.key for one in planned.objects}
        return {key: one for key, one in self._there.items() if key in keys or not self._stays(one, planned)}

    def _stays(self, one: XfrmObject, planned: IpsecPlan) -> bool:
        """Whether it belongs to a recently replaced key, an unchanged node, or all nodes."""
        if one.mark is None:
            return bool(planned.policies)
        node, spi = node_of(one.mark), one.spi if isinstance(one, XfrmState) else spi_of(one)
        return node in planned.held or (node in planned.nodes and self._ring.retains(spi))

    def matches(self, row: XfrmObject, observed: XfrmObject) -> bool:
        """Whether it has the desired keys and marks."""
        return row == observed

    async def put(self, batch: Mapping[XfrmKey, XfrmObject]) -> None:
        """Add states, replacing those with their SPI and mark, then policies. Raises BatchError."""
        failures: dict[XfrmKey, Exception] = {}
        states = [one for one in batch.values() if isinstance(one, XfrmState)]
        taken = self._note(states, await self._kernel.add_states(states), failures, errno.EEXIST)
        if taken:
            self._note(taken, await self._kernel.delete_states(taken), failures)
            self._note(taken, await self._kernel.add_states(taken), failures)
        have = {_way(one) for one in self._there.values() if isinstance(one, XfrmState)}
        policies = []
        for one in batch.values():
            if not isinstance(one, XfrmPolicy):
                continue
            if one.block or one.mark is None or _way_of(one) in have:
                policies.append(one)
            else:
                failures[one.key] = HiveError(f"{one} waits for its state")
        self._note(policies, await self._kernel.set_policies(policies), failures)
        if failures:
            raise BatchError(failures)

    def _note(
        self,
        objects: Sequence[XfrmObject],
        results: Iterable[NetlinkError | None],
        failures: dict[XfrmKey, Exception],
        again: int = 0,
    ) -> list[XfrmState]:
        """Record which writes succeeded and failed. Returns states that failed with the errno ``again``."""
        refused = []
        for one, error in zip(objects, results, strict=True):
            if error is None:
                self._there[one.key] = one
            elif error.errno == again and isinstance(one, XfrmState):
                refused.append(one)
            else:
                failures[one.key] = error
        return refused

    async def drop(self, batch: Collection[XfrmKey]) -> None:
        """Remove objects, policies first, so that their packets are blocked. Raises BatchError."""
        failures: dict[XfrmKey, Exception] = {}
        planned = self._planned()
        found = [
            one
            for key in batch
            if (one := self._there.get(key)) is not None and not self._stays(one, planned)
        ]
        policies = [one for one in found if isinstance(one, XfrmPolicy)]
        states = [one for one in found if isinstance(one, XfrmState)]
        self._note(policies, await self._kernel.delete_policies(policies), failures)
        self._note(states, await self._kernel.delete_states(states), failures)
        for one in found:
            if one.key not in failures:
                del self._there[one.key]
        if failures:
            raise BatchError(failures)


def _way(state: XfrmState) -> tuple[object, ...]:
    return state.source, state.destination, state.spi, state.mark


def _way_of(policy: XfrmPolicy) -> tuple[object, ...]:
    template = policy.templates[0]
    return template.source, template.destination, template.spi, policy.mark


# The routing table of what is marked.

TABLE: Final = 200
"""The routing table of packets before encryption and after decryption."""
RULES: Final = {kind: FwmarkRule(kind, KIND, TABLE, priority=1) for kind in (DECRYPT, ENCRYPT)}
"""Marks and masks of the rules for that table."""
FAMILIES: Final = {Family.IPV4: AF_INET, Family.IPV6: AF_INET6}


def wanted_routes(
    nodes: Iterable[ClusterNode],
    devices: Iterable[Device],
    families: Collection[Family],
    mtu: RouteMtu,
    *,
    endpoint_routes: bool,
) -> dict[XfrmKey, FwmarkRuleRow | TableRoute]:
    """Rules and routes: to this node's pods by the decrypting link, to those of others by cilium_host."""
    links = {device.name: device for device in devices}
    wanted: list[FwmarkRuleRow | TableRoute] = [
        FwmarkRuleRow(RULES[kind], FAMILIES[family])
        for family in families
        for kind in (DECRYPT, ENCRYPT)
        if kind == ENCRYPT or family is Family.IPV6 or not endpoint_routes
    ]
    host = links.get(HOST_DEVICE)
    for node in nodes:
        for family in families:
            if not node.local:
                link, size = host, mtu.encrypted()
            elif mtu.tunnelled:
                link, size = links.get(mtu.tunnel_link), 0
            else:
                link, size = _link_with(node, family, links.values()), 0
            if link is not None:
                wanted += [
                    TableRoute(cidr, link.ifindex, node.local, size) for cidr in node.alloc_cidrs(family)
                ]
    return {key_of(one): one for one in wanted}


def _link_with(node: ClusterNode, family: Family, devices: Iterable[Device]) -> Device | None:
    """The link with the node's address."""
    own = node.node_ip(family)
    return next((one for one in devices if any(each.ip == own for each in one.addresses)), None)


def key_of(row: FwmarkRuleRow | TableRoute) -> XfrmKey:
    """The kernel's key of an object."""
    if isinstance(row, FwmarkRuleRow):
        return "rule", row.family, row.rule.mark
    return "route", str(row.destination)


class IpsecRoutes(Target[XfrmKey, FwmarkRuleRow | TableRoute, FwmarkRuleRow | TableRoute]):
    """The routing table and its rules as a reconciler's target."""

    def __init__(self, kernel: XfrmEdge) -> None:
        self._kernel = kernel
        self._there: dict[XfrmKey, FwmarkRuleRow | TableRoute] = {}

    async def observe(self) -> Mapping[XfrmKey, FwmarkRuleRow | TableRoute]:
        """The present routes and rules. Raises NetlinkError."""
        self._there = {key_of(one): one for one in await self._kernel.rows()}
        return dict(self._there)

    async def put(self, batch: Mapping[XfrmKey, FwmarkRuleRow | TableRoute]) -> None:
        """Add or replace them. Raises BatchError."""
        self._raise(await self._kernel.set_rows(list(batch.values())))
        self._there |= batch

    async def drop(self, batch: Collection[XfrmKey]) -> None:
        """Remove them. Raises BatchError."""
        found = [self._there[key] for key in batch if key in self._there]
        self._raise(await self._kernel.remove_rows(found))

    @staticmethod
    def _raise(refused: Refusals) -> None:
        if refused:
            raise BatchError({key_of(row): error for row, error in refused.items()})
