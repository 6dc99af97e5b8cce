"""Which XFRM states and policies a node has for IPsec with the others, from what is known of them; pure.

Why:    the kernel encrypts a packet that leaves with a node's mark, by the policy and the state with that
        mark, and decrypts one whose mark says which node it is from. A marked packet that no policy takes is
        blocked.
Source: Cilium 1.17, pkg/datapath/linux (ipsec.go, node.go) and its marks; RFC 4301.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Final

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.nodes.node import ClusterNode
from cells.encryption.ipsec.keys import IpsecKey
from cells.netlink.xfrm import (
    REQUEST_ID,
    Direction,
    XfrmMark,
    XfrmPolicy,
    XfrmState,
    XfrmTemplate,
)

__all__ = ["DECRYPT", "ENCRYPT", "KIND", "IpsecMode", "IpsecPlan", "is_ours", "node_of", "plan", "spi_of"]

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
    """How pods' packets travel, as far as it decides which states there are."""

    families: tuple[Family, ...]
    tunnel: bool = False
    """In VXLAN: then the nodes' own IPv4 addresses have states too."""
    subnets: Mapping[Family, tuple[IPNetwork, ...]] = {}
    """Ranges that pods of all nodes share, where nodes have none of their own (ENI, Azure)."""
    interface: Mapping[Family, IPAddress] = {}
    """With subnets: the addresses of the interface that encrypts."""
    between_routers: bool = False
    """With subnets: encrypt between the routers' addresses instead of the nodes'."""
    endpoint_routes: bool = False


class IpsecPlan(msgspec.Struct, frozen=True):
    """What there is to be, in the order of making it; and which nodes stay as they are."""

    states: tuple[XfrmState, ...]
    policies: tuple[XfrmPolicy, ...]
    nodes: frozenset[int] = frozenset()
    """Numbers of the nodes it is for."""
    held: frozenset[int] = frozenset()
    """Those of them whose boot ID is not known at the moment: what they have stays."""

    @property
    def objects(self) -> Iterator[XfrmState | XfrmPolicy]:
        """All of it: states first."""
        yield from self.states
        yield from self.policies


def node_of(mark: XfrmMark) -> int:
    """The number of the node that a mark stands for; 0: none."""
    return mark.value >> 16


def spi_of(policy: XfrmPolicy) -> int:
    """The SPI of the packets that a policy encrypts; 0: it encrypts none."""
    if policy.mark is None or policy.mark.mask != _NODE_AND_SPI:
        return 0
    return policy.mark.value >> 12 & 0xF


def is_ours(one: XfrmState | XfrmPolicy) -> bool:
    """Whether this agent or Cilium's makes such states and policies: those of others are left alone."""
    if isinstance(one, XfrmState):
        kinds = {(ENCRYPT, _NODE_AND_SPI), (DECRYPT, _NODE)}
        return (one.mark.value & KIND, one.mark.mask) in kinds
    if one.direction is Direction.OUT and one.mark is not None:
        return (one.mark.value & KIND, one.mark.mask) == (ENCRYPT, _NODE_AND_SPI) or one in _BLOCKS
    return one in _SHARED


def plan(
    local: ClusterNode,
    others: Iterable[ClusterNode],
    numbers: Mapping[str, int],
    key: IpsecKey,
    mode: IpsecMode,
) -> IpsecPlan:
    """States and policies between ``local`` and the others. ``numbers``: of nodes, by ``cluster/name``.

    A node that has no number yet, or no address, has none; packets marked for it are blocked.
    """
    policies = {one.key: one for one in (_block(family) for family in mode.families)}
    states: dict[object, XfrmState] = {}
    known, held = set(), set()
    for node in sorted(others, key=lambda one: one.full_name):
        number = numbers.get(node.full_name, 0)
        if not number or node.local:
            continue
        known.add(number)
        if not node.boot_id or not local.boot_id:
            held.add(number)
            continue
        pair = _Pair(local, node, number, key, mode)
        for family in mode.families:
            for one in pair.of(family):
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
        """What they have in a family."""
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
        """From another node: a state, and the policies that let in what was encrypted and what was not."""
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
