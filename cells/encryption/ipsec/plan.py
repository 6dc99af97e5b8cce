"""Plan the XFRM states, policies and routes between this node and all others, and write them to the kernel.

Input:  nodes, their node IDs, and the active key.
Output: the plan for XfrmTarget; rules and routes for IpsecRoutes.
Why:    a packet's mark has the ID of the remote node. The kernel encrypts by the policy and state with this
        mark, decrypts by the state with the mark of the sender, and blocks marked packets without a policy.
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
    """The routing mode, as far as states and policies depend on it."""

    families: tuple[Family, ...]
    tunnel: bool = False
    """Tunnel mode: there are also states between the nodes' own IPv4 addresses."""
    subnets: Mapping[Family, tuple[IPNetwork, ...]] = {}
    """Subnets of the pods of all nodes, if nodes do not have pod CIDRs (ENI, Azure)."""
    interface: Mapping[Family, IPAddress] = {}
    """With subnets: the addresses of the encrypting interface."""
    between_routers: bool = False
    """With subnets: encrypt between router IPs instead of node IPs."""
    endpoint_routes: bool = False


class IpsecPlan(msgspec.Struct, frozen=True):
    """The desired states and policies in order of creation."""

    states: tuple[XfrmState, ...]
    policies: tuple[XfrmPolicy, ...]
    nodes: frozenset[int] = frozenset()
    """IDs of all remote nodes."""
    retained: frozenset[int] = frozenset()
    """IDs of nodes without a known boot ID, for which no key can be derived; their objects stay."""

    @property
    def objects(self) -> Iterator[XfrmState | XfrmPolicy]:
        """All states, then all policies."""
        yield from self.states
        yield from self.policies


def node_of(mark: XfrmMark) -> int:
    """Return the node ID in a mark; 0: none."""
    return mark.value >> 16


def spi_of(policy: XfrmPolicy) -> int:
    """Return the SPI in the mark of an encrypting policy; 0 for other policies."""
    if policy.mark is None or policy.mark.mask != _NODE_AND_SPI:
        return 0
    return policy.mark.value >> 12 & 0xF


def is_ours(one: XfrmState | XfrmPolicy) -> bool:
    """Return whether this agent or Cilium's creates states or policies of this form; others are ignored."""
    if isinstance(one, XfrmState):
        kinds = {(ENCRYPT, _NODE_AND_SPI), (DECRYPT, _NODE)}
        return (one.mark.value & KIND, one.mark.mask) in kinds
    if one.direction is Direction.OUT and one.mark is not None:
        return (one.mark.value & KIND, one.mark.mask) == (ENCRYPT, _NODE_AND_SPI) or one in _BLOCKS
    return one in _ACCEPTS


def blocks(families: Iterable[Family]) -> list[XfrmPolicy]:
    """Return the policies that block marked packets that no other policy matches."""
    return [_block(family) for family in families]


class IpsecPlanner:
    """Plans for this node. Recomputes a remote node only if it, this node or the key has changed."""

    def __init__(self, mode: IpsecMode) -> None:
        self._mode = mode
        self._cache: dict[str, tuple[object, tuple[XfrmState | XfrmPolicy, ...]]] = {}
        """Inputs and result by the name of the remote node."""

    def plan(
        self,
        local: ClusterNode | None,
        others: Iterable[ClusterNode],
        node_ids: Mapping[str, int],
        key: IpsecKey | None,
    ) -> IpsecPlan:
        """Plan states and policies between ``local`` and each other node; ``node_ids`` by ``cluster/name``.

        A node without an ID or address gets none, so packets marked for it are blocked. While this node or
        the key is unknown, only the blocking policies are planned; existing objects are retained.
        """
        policies = {one.key: one for one in blocks(self._mode.families)}
        states: dict[object, XfrmState] = {}
        known, retained = set(), set()
        before, self._cache = self._cache, {}
        for node in sorted(others, key=lambda one: one.full_name):
            node_id = node_ids.get(node.full_name, 0)
            if not node_id or node.local:
                continue
            known.add(node_id)
            if local is None or key is None or not node.boot_id or not local.boot_id:
                retained.add(node_id)
                continue
            inputs = (local.addresses, local.boot_id, node, node_id, key)
            cached = before.get(node.full_name)
            if cached is None or cached[0] != inputs:
                pair = _NodePair(local, node, node_id, key, self._mode)
                cached = inputs, tuple(one for family in self._mode.families for one in pair.objects(family))
            self._cache[node.full_name] = cached
            for one in cached[1]:
                if isinstance(one, XfrmPolicy):
                    policies[one.key] = one
                else:
                    states.setdefault(one.key, one)
        found = tuple(states.values()), tuple(policies.values())
        return IpsecPlan(*found, frozenset(known), frozenset(retained))


class _NodePair:
    """Computes the states and policies between this node and a remote node."""

    def __init__(
        self, local: ClusterNode, remote: ClusterNode, node_id: int, key: IpsecKey, mode: IpsecMode
    ) -> None:
        self._local, self._remote, self._key, self._mode = local, remote, key, mode
        self._out = XfrmMark(node_id << 16 | key.spi << 12 | ENCRYPT, _NODE_AND_SPI)
        self._in = XfrmMark(node_id << 16 | DECRYPT, _NODE)

    def objects(self, family: Family) -> Iterator[XfrmState | XfrmPolicy]:
        """Yield the states and policies of one family."""
        mode = self._mode
        own, other = self._local.router_ip(family), self._remote.router_ip(family)
        own_node, other_node = self._local.node_ip(family), self._remote.node_ip(family)
        everything = EVERYTHING[family]
        if mode.subnets:
            inside = mode.interface.get(family) or own_node
            way = (own, other) if mode.between_routers else (inside, other_node)
            yield from self._outbound(everything, mode.subnets.get(family, ()), *way)
            yield from self._inbound(own, other)
            yield from self._inbound(inside, other_node)
            return
        ranges = self._remote.alloc_cidrs(family)
        if other is None or not ranges:
            return
        yield from self._outbound(everything, ranges, own, other)
        yield from self._inbound(own, other)
        if mode.tunnel and family is Family.IPV4 and own_node is not None and other_node is not None:
            alone = (ip_network(own_node), (ip_network(other_node),))
            yield from self._outbound(*alone, own_node, other_node)
            yield from self._inbound(own_node, other_node)

    def _outbound(
        self,
        source: IPNetwork,
        destinations: Iterable[IPNetwork],
        own: IPAddress | None,
        other: IPAddress | None,
    ) -> Iterator[XfrmState | XfrmPolicy]:
        """Yield the encrypting state, and a policy for each destination network of the remote node."""
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

    def _inbound(self, own: IPAddress | None, other: IPAddress | None) -> Iterator[XfrmState | XfrmPolicy]:
        """Yield the decrypting state, and the policies that accept decrypted packets and packets in clear."""
        if own is None or other is None or own == other:
            return
        keys = self._key.between(other, own, self._remote.boot_id, self._local.boot_id)
        unmarked = bool(self._mode.subnets) and self._mode.endpoint_routes
        yield _state(other, own, keys, self._in, XfrmMark(0 if unmarked else DECRYPT, _NODE_AND_SPI))
        yield from (_accept(direction, Family.of(own)) for direction in (Direction.FWD, Direction.IN))


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


def _accept(direction: Direction, family: Family) -> XfrmPolicy:
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
_ACCEPTS: Final = tuple(
    _accept(direction, family) for direction in (Direction.FWD, Direction.IN) for family in Family
)


# Reconciling XFRM with the plan.

XfrmObject = XfrmState | XfrmPolicy
XfrmKey = tuple[object, ...]
Refusals = Mapping[FwmarkRuleRow | TableRoute, NetlinkError]


class XfrmEdge(Protocol):
    """Access to XFRM states and policies, and to the routing table of marked packets.

    Methods that list, and remove_routes(), raise NetlinkError; the others return an error for each rejected
    object.
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
    """Reconciler target for XFRM. Ignores objects of other programs and objects that are retained.

    States are added before the policies that use them, as a policy without its state drops packets.
    """

    def __init__(self, kernel: XfrmEdge, ring: KeyRing, planned: Callable[[], IpsecPlan]) -> None:
        self._kernel = kernel
        self._ring = ring
        self._planned = planned
        self._actual: dict[XfrmKey, XfrmObject] = {}

    async def observe(self) -> Mapping[XfrmKey, XfrmObject]:
        """Return our existing objects, without those to retain that are not planned. Raises NetlinkError."""
        found: list[XfrmObject] = [*await self._kernel.states(), *await self._kernel.policies()]
        self._actual = {one.key: one for one in found if is_ours(one)}
        planned = self._planned()
        keys = {one.key for one in planned.objects}
        return {key: one for key, one in self._actual.items() if key in keys or not self._keeps(one, planned)}

    def _keeps(self, one: XfrmObject, planned: IpsecPlan) -> bool:
        """Return whether an unplanned object is retained: of a replaced key, or a node without boot ID."""
        if one.mark is None:
            return bool(planned.policies)
        node, spi = node_of(one.mark), one.spi if isinstance(one, XfrmState) else spi_of(one)
        return node in planned.retained or (node in planned.nodes and self._ring.retains(spi))

    def matches(self, row: XfrmObject, observed: XfrmObject) -> bool:
        """Return whether the object exists with the desired keys and marks."""
        return row == observed

    async def put(self, batch: Mapping[XfrmKey, XfrmObject]) -> None:
        """Add states, replacing those with the same SPI and mark, then policies. Raises BatchError."""
        failures: dict[XfrmKey, Exception] = {}
        states = [one for one in batch.values() if isinstance(one, XfrmState)]
        existing = self._record_results(states, await self._kernel.add_states(states), failures, errno.EEXIST)
        if existing:
            self._record_results(existing, await self._kernel.delete_states(existing), failures)
            self._record_results(existing, await self._kernel.add_states(existing), failures)
        present = {_state_id(one) for one in self._actual.values() if isinstance(one, XfrmState)}
        policies = []
        for one in batch.values():
            if not isinstance(one, XfrmPolicy):
                continue
            if one.block or one.mark is None or _template_id(one) in present:
                policies.append(one)
            else:
                failures[one.key] = HiveError(f"{one} waits for its state")
        self._record_results(policies, await self._kernel.set_policies(policies), failures)
        if failures:
            raise BatchError(failures)

    def _record_results(
        self,
        objects: Sequence[XfrmObject],
        results: Iterable[NetlinkError | None],
        failures: dict[XfrmKey, Exception],
        again: int = 0,
    ) -> list[XfrmState]:
        """Record the results of writes. Return the states that failed with the errno ``again``."""
        refused = []
        for one, error in zip(objects, results, strict=True):
            if error is None:
                self._actual[one.key] = one
            elif error.errno == again and isinstance(one, XfrmState):
                refused.append(one)
            else:
                failures[one.key] = error
        return refused

    async def drop(self, batch: Collection[XfrmKey]) -> None:
        """Delete objects, policies first, so that their packets are blocked meanwhile. Raises BatchError."""
        failures: dict[XfrmKey, Exception] = {}
        planned = self._planned()
        found = [
            one
            for key in batch
            if (one := self._actual.get(key)) is not None and not self._keeps(one, planned)
        ]
        policies = [one for one in found if isinstance(one, XfrmPolicy)]
        states = [one for one in found if isinstance(one, XfrmState)]
        self._record_results(policies, await self._kernel.delete_policies(policies), failures)
        self._record_results(states, await self._kernel.delete_states(states), failures)
        for one in found:
            if one.key not in failures:
                del self._actual[one.key]
        if failures:
            raise BatchError(failures)


def _state_id(state: XfrmState) -> tuple[object, ...]:
    return state.source, state.destination, state.spi, state.mark


def _template_id(policy: XfrmPolicy) -> tuple[object, ...]:
    template = policy.templates[0]
    return template.source, template.destination, template.spi, policy.mark


# The routing table of marked packets.

TABLE: Final = 200
"""Number of the routing table for packets before encryption and after decryption."""
RULES: Final = {kind: FwmarkRule(kind, KIND, TABLE, priority=1) for kind in (DECRYPT, ENCRYPT)}
"""The rule for that table by mark."""
FAMILIES: Final = {Family.IPV4: AF_INET, Family.IPV6: AF_INET6}


def wanted_routes(
    nodes: Iterable[ClusterNode],
    devices: Iterable[Device],
    families: Collection[Family],
    mtu: RouteMtu,
    *,
    endpoint_routes: bool,
) -> dict[XfrmKey, FwmarkRuleRow | TableRoute]:
    """Return the desired rules and routes: to local pods over the decrypting link, else over cilium_host."""
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
    own = node.node_ip(family)
    return next((one for one in devices if any(each.ip == own for each in one.addresses)), None)


def key_of(row: FwmarkRuleRow | TableRoute) -> XfrmKey:
    """Return the key by which the kernel identifies a rule or route."""
    if isinstance(row, FwmarkRuleRow):
        return "rule", row.family, row.rule.mark
    return "route", str(row.destination)


class IpsecRoutes(Target[XfrmKey, FwmarkRuleRow | TableRoute, FwmarkRuleRow | TableRoute]):
    """Reconciler target for the routing table of marked packets and its rules."""

    def __init__(self, kernel: XfrmEdge) -> None:
        self._kernel = kernel
        self._actual: dict[XfrmKey, FwmarkRuleRow | TableRoute] = {}

    async def observe(self) -> Mapping[XfrmKey, FwmarkRuleRow | TableRoute]:
        """List the rules and routes. Raises NetlinkError."""
        self._actual = {key_of(one): one for one in await self._kernel.rows()}
        return dict(self._actual)

    async def put(self, batch: Mapping[XfrmKey, FwmarkRuleRow | TableRoute]) -> None:
        """Add or replace rules and routes. Raises BatchError."""
        self._raise(await self._kernel.set_rows(list(batch.values())))
        self._actual |= batch

    async def drop(self, batch: Collection[XfrmKey]) -> None:
        """Remove rules and routes. Raises BatchError."""
        found = [self._actual[key] for key in batch if key in self._actual]
        self._raise(await self._kernel.remove_rows(found))

    @staticmethod
    def _raise(refused: Refusals) -> None:
        if refused:
            raise BatchError({key_of(row): error for row, error in refused.items()})
