"""Claims addresses and ranges of other nodes in the ipcache.

Reconciler: the table ``nodes`` in, claims in the ipcache out, shown in ``remote-node-prefixes``.
Why:        packets from another node's own address carry that node's identity, not the world's; and packets
            to a pod that is not known yet are sent to its node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from ipaddress import IPv4Address, ip_network
from typing import Final

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.base.labels import CIDR, Label, cidr_label, parse, texts
from cells.cluster.encryption import ClusterEncryption
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import (
    HEALTH,
    INGRESS,
    REMOTE_NODE,
    RESERVED_IDENTITIES,
    WORLD,
    WORLD_IPV4,
    WORLD_IPV6,
)
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Prefix, Source, prefix_of
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, ClusterNode
from cells.cluster.nodes.parse import HostFirewallUse, RulePeers
from cells.config import AgentConfig
from lifecycle import (
    Jobs,
    ReadTable,
    Reconciler,
    Tables,
    Target,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)

__all__ = ["NodeClaim", "RemoteNodes", "cell", "claims_of"]


# Claims of addresses and pod ranges.
#
# Source: Cilium 1.17, NodeManager.nodeUpdated and nodeAddressHasTunnelIP.

NO_TUNNEL_ENDPOINT: Final = IPv4Address(0)
NODE: Final = "node"
"""The source of nodes' labels."""
SWEEP: Final = minutes(5)

Key = tuple[Prefix, str]
"""A prefix and a node that claims it: two nodes may claim one."""


class NodeClaim(msgspec.Struct, frozen=True):
    """A prefix of another node."""

    prefix: Prefix
    node: str
    """``cluster/name``."""
    identity: int
    source: Source
    tunnel_endpoint: IPv4Address = NO_TUNNEL_ENDPOINT
    """The node's own address, if packets to the prefix pass the tunnel."""
    encrypt_key: int = 0
    labels: tuple[str, ...] = ()
    """Labels of an identity that replaces ``identity``, if policies select nodes by labels or CIDR."""

    @property
    def key(self) -> Key:
        """The key of its row."""
        return self.prefix, self.node

    @property
    def resource(self) -> str:
        """The resource of its claim in the ipcache."""
        return f"node//{self.node}"

    @property
    def entry(self) -> IpcacheEntry:
        """The claim for the ipcache."""
        return IpcacheEntry(
            prefix=self.prefix,
            identity=self.identity,
            source=self.source,
            resource=self.resource,
            tunnel_endpoint=self.tunnel_endpoint,
            encrypt_key=self.encrypt_key,
        )


def node_labels(node: ClusterNode, ip: IPAddress, *, labelled: bool, by_cidr: bool) -> tuple[str, ...]:
    """Return the labels of the node's identity at this address; empty for the reserved one."""
    own = [Label(NODE, key, value) for key, value in node.labels.items()] if labelled else []
    if by_cidr:
        own.append(Label(CIDR, cidr_label(ip_network(ip))))
    return texts([*own, *map(parse, RESERVED_IDENTITIES[REMOTE_NODE])]) if labelled or own else ()


def claims_of(
    node: ClusterNode,
    world_ids: Mapping[Family, int],
    *,
    labelled: bool = False,
    by_cidr: bool = False,
    encrypted: bool = False,
    firewalled: bool = False,
) -> Iterator[NodeClaim]:
    """The claims of another node: its addresses, and its pods' ranges with the lowest precedence.

    ``world_ids`` is the identity of the world, by enabled family. An unknown pod has it, too, but its packets
    are sent to its node. ``labelled``: the node's labels make its identity; ``by_cidr``: its address does, so
    that networks in policies select it. Packets to its pods are encrypted if it publishes a key;
    ``encrypted``: those to its addresses, too. All its addresses then have a tunnel endpoint, also with a
    host firewall (``firewalled``), to which the tunnel carries the identity of the sending pod.
    """
    if node.local:
        return
    reached = node.node_ip(Family.IPV4)
    peer = reached if isinstance(reached, IPv4Address) else NO_TUNNEL_ENDPOINT
    found: dict[Prefix, NodeClaim] = {}
    for cidr in node.all_cidrs():
        if Family.of(cidr) in world_ids:
            world = world_ids[Family.of(cidr)]
            found[str(cidr)] = NodeClaim(
                str(cidr), node.full_name, world, Source.UNSPEC, peer, node.encryption_key
            )
    behind = [(ip, HEALTH) for ip in node.health] + [(ip, INGRESS) for ip in node.ingress]
    for ip, identity in behind:
        if Family.of(ip) in world_ids:
            prefix = prefix_of(ip)
            found[prefix] = NodeClaim(
                prefix, node.full_name, identity, node.source, peer, node.encryption_key
            )
    for address in node.addresses:
        if Family.of(address.ip) not in world_ids:
            continue
        prefix = prefix_of(address.ip)
        tunnelled = encrypted or firewalled or address.type == CILIUM_INTERNAL_IP
        to = peer if tunnelled else NO_TUNNEL_ENDPOINT
        labels = node_labels(node, address.ip, labelled=labelled, by_cidr=by_cidr)
        key = node.encryption_key if encrypted else 0
        found[prefix] = NodeClaim(prefix, node.full_name, REMOTE_NODE, node.source, to, key, labels)
    yield from found.values()


def world_identities(agent: AgentConfig) -> dict[Family, int]:
    """The identity of the world by family: WORLD if one family is enabled."""
    if agent.ipv4 and agent.ipv6:
        return {Family.IPV4: WORLD_IPV4, Family.IPV6: WORLD_IPV6}
    return {Family.IPV4 if agent.ipv4 else Family.IPV6: WORLD}


class ContestedClaim(msgspec.Struct, frozen=True):
    """A claim, with the facts of this node that decide on it."""

    claim: NodeClaim
    own: tuple[IPNetwork, ...]
    """This node's ranges."""
    encrypts: bool
    """Whether it has not opted out of encryption to nodes."""

    @property
    def effective(self) -> NodeClaim:
        """The claim, without encryption key if this node does not encrypt to nodes."""
        if self.encrypts or not self.claim.encrypt_key:
            return self.claim
        return msgspec.structs.replace(self.claim, encrypt_key=0)

    @property
    def refused(self) -> bool:
        """Whether another node claims a range within this node's own ranges."""
        inner = ip_network(self.claim.prefix)
        return self.claim.source is Source.UNSPEC and any(
            inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]  # of one version
            for outer in self.own
        )


def node_claims(
    nodes: ReadTable[str, ClusterNode],
    agent: AgentConfig,
    peers: RulePeers,
    encryption: ClusterEncryption | None,
    firewall: HostFirewallUse | None,
    tables: Tables,
) -> ReadTable[tuple[str, str], NodeClaim]:
    """The table ``remote-node-prefixes``."""
    labelled, by_cidr = peers.nodes_by_labels, peers.nodes_by_cidr
    encrypted = encryption is not None and encryption.nodes
    firewalled = firewall is not None and firewall.enabled
    claims = partial(
        claims_of,
        world_ids=world_identities(agent),
        labelled=labelled,
        by_cidr=by_cidr,
        encrypted=encrypted,
        firewalled=firewalled,
    )
    published = nodes.flat_map(
        claims,
        key=lambda one: one.key,
        name="published-node-prefixes",
    )
    own = nodes.filter(lambda node: node.local, name="own-node").map(
        lambda node: (tuple(node.all_cidrs()), bool(node.encryption_key)), name="own-ranges"
    )
    contested = published.left_join(
        own,
        lambda claim, node: ContestedClaim(claim, *(node or ((), False))),
        on=lambda _: (
            f"{agent.cluster_name}/{agent.node_name}"
        ),  # evaluated after the start: reads the host's name
        name="contested-prefixes",
    )
    found = contested.filter(lambda one: not one.refused, name="uncontested-prefixes").map(
        lambda one: one.effective, name="remote-node-prefixes"
    )
    tables.add(found)
    return found


class ClaimTarget(Target[Key, NodeClaim, NodeClaim]):
    """The ipcache as a reconciler's target, for claims of this cell."""

    def __init__(self, ipcache: Ipcache, identities: Identities) -> None:
        self._ipcache = ipcache
        self._identities = identities
        self._claimed: dict[Key, NodeClaim] = {}
        self._numbers: dict[Key, int] = {}
        """Acquired identities of nodes by labels."""

    async def observe(self) -> Mapping[Key, NodeClaim]:
        """This cell's claims in the ipcache."""
        claim_of = self._ipcache.claim_of
        return {key: one for key, one in self._claimed.items() if claim_of(one.prefix, one.resource)}

    async def put(self, batch: Mapping[Key, NodeClaim]) -> None:
        """Make the claims. Raises OSError if the kernel refuses one: then none is made."""
        entries: list[IpcacheEntry] = []
        numbers: dict[Key, int] = {}
        for key, claim in batch.items():
            entry = claim.entry
            if claim.labels:
                identity = self._identities.acquire_now(claim.labels)
                assert identity is not None  # noqa: S101  # a local identity, which is available at once
                numbers[key] = identity.id
                entry = msgspec.structs.replace(entry, identity=identity.id)
            entries.append(entry)
        try:
            self._ipcache.upsert(*entries)
        except BaseException:
            self._release(numbers)
            raise
        self._claimed.update(batch)
        self._release({key: self._numbers.pop(key) for key in batch if key in self._numbers})
        self._numbers |= numbers

    async def drop(self, batch: Collection[Key]) -> None:
        """Withdraw the claims.

        Raises OSError: the claims are removed, the entries follow with the next comparison.
        """
        removed = [claim for key in batch if (claim := self._claimed.pop(key, None)) is not None]
        numbers = {key: self._numbers.pop(key) for key in batch if key in self._numbers}
        try:
            for claim in removed:
                self._ipcache.withdraw(claim.resource, [claim.prefix])
        finally:
            self._release(numbers)

    def _release(self, numbers: Mapping[Key, int]) -> None:
        for number in numbers.values():
            self._identities.release(number)


class RemoteNodes:
    """Maintains the claims.

    Until all nodes are known, no entry of the ipcache is deleted for lack of a claim.
    """

    def __init__(
        self,
        claims: ReadTable[tuple[str, str], NodeClaim],
        ipcache: Ipcache,
        identities: Identities,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._first = ipcache.table.initializer("remote-nodes")
        self._reconciler: Reconciler[Key, NodeClaim] = Reconciler(
            claims, ClaimTarget(ipcache, identities), full_every=SWEEP, put_early=True
        )
        self._claims = claims
        tables.add(self._reconciler.statuses)
        jobs.observe("claims", self._reconciler)
        jobs.one_shot("wait for claims", self._wait)

    async def _wait(self) -> None:
        await self._claims.wait_initialized()
        for key in list(self._claims.keys()):
            await self._reconciler.wait_realised(key)
        self._first.done()


cell = module(
    "remote-nodes",
    "Other nodes in the ipcache",
    provide(RemoteNodes),
    provide_private(node_claims),
    invoke(RemoteNodes),
)
