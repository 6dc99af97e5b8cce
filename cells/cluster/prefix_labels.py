"""Labels of prefixes: each source adds labels, and all labels of a prefix make up its identity.

Controller: the table ``prefix-labels``, which any source may write, and the claims in the ipcache in; claims
            in the ipcache, and labels of the host's identity, out.
Why:        an address may belong to another node and to an API server, or to a CIDR of a policy. The sources
            are independent, but a packet has one identity.
Source:     Cilium 1.17, pkg/ipcache/metadata.go.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from functools import partial
from ipaddress import ip_network
from typing import Final

import msgspec

from cells.base.addresses import IPNetwork
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import (
    HOST,
    REMOTE_NODE,
    RESERVED_IDENTITIES,
    WORLD,
    WORLD_IPV4,
    WORLD_IPV6,
    Scope,
    scope_for,
    scope_of,
)
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Prefix, Source
from cells.config import AgentConfig
from lifecycle import Change, Jobs, Table, invoke, module, provide, provide_private

__all__ = ["PrefixFacts", "PrefixLabels", "PrefixMetadata", "cell", "resolved"]


# Labels by source.
#
# Source: Cilium 1.17, the ipcache's metadata: UpsertLabels, RemoveLabels, OverrideIdentity.


class PrefixLabels(msgspec.Struct, frozen=True, kw_only=True):
    """A resource's labels of a prefix; a row of the table ``prefix-labels``."""

    prefix: Prefix
    resource: str
    """``<kind>/<namespace>/<name>``. It has one row for a prefix."""
    source: Source
    labels: tuple[str, ...]
    """``source:key[=value]``."""
    override: bool = False
    """Whether these replace the labels of all other resources."""


class PrefixMetadata:
    """Receives labels of prefixes from sources.

    A source with initial labels registers with ``table.initializer()`` in its constructor. Until all of them
    are done, no entry of the ipcache is deleted for lack of a claim.
    """

    def __init__(self, table: Table[tuple[str, str], PrefixLabels]) -> None:
        self.table = table

    def upsert(self, *rows: PrefixLabels) -> None:
        """Set labels of prefixes, replacing those of the same resource.

        Raises ValueError for labels of a cluster identity, such as a pod's: prefixes have local identities,
        which are available without waiting.
        """
        for row in rows:
            if scope_for(row.labels) is Scope.CLUSTER:
                raise ValueError(
                    f"labels of {row.prefix} by {row.resource}: {', '.join(row.labels)}: expected sources"
                    " reserved, cidr, cidrgroup or fqdn, or labels of a node with reserved:remote-node"
                )
        with self.table.txn() as txn:
            for row in rows:
                txn.put(row)

    def remove(self, resource: str, prefixes: Iterable[Prefix]) -> None:
        """Remove the resource's labels of these prefixes, if any."""
        with self.table.txn() as txn:
            for prefix in prefixes:
                if self.table.get((prefix, resource)) is not None:
                    txn.delete((prefix, resource))


# The labels of a prefix's identity.
#
# Source: Cilium 1.17, the ipcache's resolution of labels.

_WORLD: Final = frozenset({"reserved:world", "reserved:world-ipv4", "reserved:world-ipv6"})
_IN_CLUSTER: Final = frozenset({"reserved:remote-node", "reserved:health", "reserved:ingress"})
_OUTSIDE: Final = ("cidr:", "fqdn:", "cidrgroup:")
"""Sources of labels that only prefixes outside the cluster have, or nodes with the identity ``remote-node``.
"""


class PrefixFacts(msgspec.Struct, frozen=True):
    """Facts about a prefix from the ipcache."""

    identity: int = 0
    """The identity of its effective claim by another resource; 0 without one."""
    labels: tuple[str, ...] = ()
    """Labels of that identity."""
    around: tuple[str, ...] = ()
    """Labels of the nearest prefix in rules that contains it, without those of the world."""
    world: tuple[str, ...] = ("reserved:world",)
    """Labels of the world in the prefix's family."""


def resolved(rows: Collection[PrefixLabels], known: PrefixFacts) -> tuple[str, ...] | None:
    """Return the sorted labels of the prefix's identity; None if it keeps the identity of its claims.

    It keeps that one without labels, for a pod, and for this node: there, the labels are added to the host's
    identity.
    """
    overriding = sorted(row.resource for row in rows if row.override)
    if overriding:  # the first resource by name wins
        return next(tuple(sorted(set(row.labels))) for row in rows if row.resource == overriding[0])
    if not rows or known.identity == HOST:
        return None
    labels = labels_of(rows)
    scope = scope_of(known.identity)
    node = known.identity == REMOTE_NODE or scope is Scope.REMOTE_NODE
    if node or labels & _IN_CLUSTER:
        inside = {one for one in labels if one not in _WORLD and not one.startswith(_OUTSIDE)}
        return tuple(sorted(inside | set(known.labels) if node else inside))
    if known.identity and scope is not Scope.LOCAL and not _WORLD.intersection(known.labels):
        return None
    return tuple(sorted({*labels, *known.around, *known.world}))


def labels_of(rows: Iterable[PrefixLabels]) -> set[str]:
    """The merged labels of all resources."""
    return {label for row in rows for label in row.labels}


# Claims of prefixes with labels.
#
# Identities are local to this node, unless the labels are those of a reserved identity.

RESOURCE: Final = "prefix-labels"
"""The resource of the claims in the ipcache."""
_STRENGTH: Final = {source: strength for strength, source in enumerate(Source)}


def contains(outer: IPNetwork, inner: IPNetwork) -> bool:
    """Whether ``outer`` contains every address of ``inner``."""
    return outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]  # of one version


class PrefixClaims:
    """Maintains the claims. Until all sources of labels are known, leftovers of the map stay."""

    def __init__(
        self,
        metadata: PrefixMetadata,
        ipcache: Ipcache,
        identities: Identities,
        agent: AgentConfig,
        *,
        jobs: Jobs,
    ) -> None:
        self._rows = metadata.table
        self._ipcache = ipcache
        self._identities = identities
        self._dual_stack = agent.ipv4 and agent.ipv6
        self._claimed: dict[Prefix, IpcacheEntry] = {}
        self._generated: dict[Prefix, IPNetwork] = {}
        """Prefixes in rules."""
        self._of_host: dict[Prefix, frozenset[str]] = {}
        """Labels of this node's own addresses."""
        self._outdated: dict[Prefix, None] = {}
        """Prefixes with claims to update. Those that the kernel refused stay for the retry of the job."""
        self._first = ipcache.table.initializer(RESOURCE)
        jobs.observe("labels", self._rows.changes, self._follow_labels)
        jobs.one_shot("first", self._claim_initial)
        claims = partial(ipcache.table.changes, only=self._is_relevant)
        jobs.observe("claims of others", claims, self._follow_claims)

    async def _claim_initial(self) -> None:
        await self._rows.wait_initialized()
        self._update_claims(list(self._prefixes()))
        self._first.done()

    async def _follow_labels(self, changes: list[Change[tuple[str, str], PrefixLabels]]) -> None:
        self._update_claims(list(dict.fromkeys(change.key[0] for change in changes)))

    def _is_relevant(self, key: Hashable, old: IpcacheEntry | None, row: IpcacheEntry | None) -> bool:
        """Whether rules contain or contained the prefix, or a source has labels for it."""
        of_rules = any(one is not None and one.is_of(Source.GENERATED) for one in (old, row))
        return of_rules or bool(self._rows.by("prefix").get(str(key)))

    async def _follow_claims(self, changes: list[Change[str, IpcacheEntry]]) -> None:
        affected: set[Prefix] = set()
        for change in changes:
            prefix = change.key
            if change.row is not None and change.row.is_of(Source.GENERATED):
                around = None if prefix in self._generated else ip_network(prefix)
                if around is not None:
                    self._generated[prefix] = around
            else:
                around = self._generated.pop(prefix, None)
            if around is not None:
                affected |= {one for one in self._prefixes() if contains(around, ip_network(one))}
            elif self._rows.by("prefix").get(prefix):
                affected.add(prefix)
        self._update_claims(affected)

    def _prefixes(self) -> set[Prefix]:
        return {row.prefix for row in self._rows.all()}

    def _update_claims(self, prefixes: Iterable[Prefix]) -> None:
        """Update the claims of these prefixes. Raises OSError if the kernel refuses; the job repeats it."""
        self._outdated |= dict.fromkeys(prefixes)
        for prefix in list(self._outdated):
            rows = list(self._rows.by("prefix").get(prefix))
            base = self._claim_by_others(prefix)
            labels = resolved(rows, self._known(prefix, base)) if rows else None
            if labels is not None:
                self._claim(prefix, labels, rows, base)
            elif (claimed := self._claimed.pop(prefix, None)) is not None:
                try:
                    self._ipcache.withdraw(RESOURCE, [prefix])
                finally:
                    self._identities.release(claimed.identity)
            if rows and labels is None and base is not None and base.identity == HOST:
                self._of_host[prefix] = frozenset(labels_of(rows))
            else:
                self._of_host.pop(prefix, None)
            self._outdated.pop(prefix, None)
        self._identities.label_host(RESOURCE, frozenset[str]().union(*self._of_host.values()))

    def _known(self, prefix: Prefix, base: IpcacheEntry | None) -> PrefixFacts:
        network = ip_network(prefix)
        world = (WORLD_IPV4 if network.version == 4 else WORLD_IPV6) if self._dual_stack else WORLD
        identity = self._identities.get(base.identity) if base is not None else None
        return PrefixFacts(
            base.identity if base is not None else 0,
            identity.labels if identity is not None else (),
            tuple(self._labels_around(network)),
            RESERVED_IDENTITIES[world],
        )

    def _claim(
        self,
        prefix: Prefix,
        labels: tuple[str, ...],
        rows: list[PrefixLabels],
        base: IpcacheEntry | None,
    ) -> None:
        """Claim the prefix, with the highest precedence among its sources."""
        sources = [row.source for row in rows] + ([base.source] if base is not None else [])
        claimed = self._claimed.get(prefix)
        identity = self._identities.acquire_now(labels)
        assert identity is not None  # noqa: S101  # a local identity, which is available at once
        claim = IpcacheEntry(
            prefix=prefix,
            identity=identity.id,
            source=min(sources, key=_STRENGTH.__getitem__),
            resource=RESOURCE,
        )
        if base is not None:
            claim = msgspec.structs.replace(
                claim,
                tunnel_endpoint=base.tunnel_endpoint,
                encrypt_key=base.encrypt_key,
                skip_tunnel=base.skip_tunnel,
            )
        row = self._ipcache.table.get(prefix)
        try:
            if claim != claimed or (row is not None and row.resource != RESOURCE):
                self._ipcache.upsert(claim)
                self._claimed[prefix] = claim
        finally:
            taken = self._claimed.get(prefix) is claim
            stale = claimed if taken else claim
            if stale is not None:
                self._identities.release(stale.identity)

    def _claim_by_others(self, prefix: Prefix) -> IpcacheEntry | None:
        """The effective claim of other resources."""
        row = self._ipcache.table.get(prefix)
        return next((one for one in row.claims if one.resource != RESOURCE), None) if row else None

    def _labels_around(self, network: IPNetwork) -> Iterator[str]:
        """The labels of the nearest prefix in rules that contains it, without those of the world."""
        found = [one for one in self._generated.values() if contains(one, network)]
        for nearest in sorted(found, key=lambda one: -one.prefixlen):
            row = self._ipcache.table.get(str(nearest))
            claims = [one for one in row.claims if one.source is Source.GENERATED] if row else []
            for claim in claims:
                if (known := self._identities.get(claim.identity)) is not None:
                    yield from (text for text in known.labels if not text.startswith("reserved:"))
                    return


def table() -> Table[tuple[str, str], PrefixLabels]:
    """The table ``prefix-labels``, by prefix and resource."""
    return Table(
        "prefix-labels",
        key=lambda row: (row.prefix, row.resource),
        indexes={"prefix": lambda row: (row.prefix,)},
    )


cell = module(
    "prefix-labels",
    "Labels of prefixes",
    provide(table, PrefixMetadata),
    provide_private(PrefixClaims),
    invoke(PrefixClaims),
)
