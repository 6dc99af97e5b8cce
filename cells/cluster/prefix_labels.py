"""Labels by prefix: each source adds what it knows, and all labels together make up the identity.

Controller: the table ``prefix-labels``, which any source may add to, and the claims of the ipcache in; claims
            of the ipcache, and labels of the host's identity, out.
Why:        an address may be another node's and an API server's, or one of a network that a policy names. No
            source knows of the others, and packets have one identity.
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

__all__ = ["Known", "PrefixLabels", "PrefixMetadata", "cell", "resolved"]


# What sources say of prefixes.
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


# Which labels make a prefix's identity, of all that sources have for it.
#
# Source: Cilium 1.17, the ipcache's resolution of labels.

_WORLD: Final = frozenset({"reserved:world", "reserved:world-ipv4", "reserved:world-ipv6"})
_IN_CLUSTER: Final = frozenset({"reserved:remote-node", "reserved:health", "reserved:ingress"})
_OUTSIDE: Final = ("cidr:", "fqdn:", "cidrgroup:")
"""Sources of labels that only prefixes outside the cluster have, or nodes with the identity ``remote-node``.
"""


class Known(msgspec.Struct, frozen=True):
    """Other facts about a prefix."""

    identity: int = 0
    """That of the effective claim in the ipcache that does not come from labels; 0 without one."""
    labels: tuple[str, ...] = ()
    """Labels of that identity."""
    around: tuple[str, ...] = ()
    """Labels of the nearest prefix in rules that contains it, without those of the world."""
    world: tuple[str, ...] = ("reserved:world",)
    """Labels of the world in the prefix's family."""


def resolved(rows: Collection[PrefixLabels], known: Known) -> tuple[str, ...] | None:
    """The sorted labels of the prefix's identity; None if it keeps the identity of its claims.

    It keeps that without labels, for a pod, and for this node, as its identity gets the labels: see
    labels_of().
    """
    overriding = sorted(row.resource for row in rows if row.override)
    if overriding:  # several contradict each other: the first by name
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


# Identities of prefixes that have labels: their claims in the ipcache.
#
# Each is an identity of this node's own, unless its labels are a reserved one's.

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
        self._first = ipcache.table.initializer(RESOURCE)
        jobs.observe("labels", self._rows.changes, self._follow_labels)
        jobs.one_shot("first", self._complete)
        claims = partial(ipcache.table.changes, only=self._matters)
        jobs.observe("claims of others", claims, self._follow_claims)

    async def _complete(self) -> None:
        await self._rows.wait_initialized()
        self._settle(list(self._prefixes()))
        self._first.done()

    async def _follow_labels(self, changes: list[Change[tuple[str, str], PrefixLabels]]) -> None:
        self._settle(list(dict.fromkeys(change.key[0] for change in changes)))

    def _matters(self, key: Hashable, old: IpcacheEntry | None, row: IpcacheEntry | None) -> bool:
        """Whether rules contain or contained the prefix, or a source has labels for it."""
        of_rules = any(one is not None and one.is_of(Source.GENERATED) for one in (old, row))
        return of_rules or bool(self._rows.by("prefix").get(str(key)))

    async def _follow_claims(self, changes: list[Change[str, IpcacheEntry]]) -> None:
        touched: set[Prefix] = set()
        for change in changes:
            prefix = change.key
            if change.row is not None and change.row.is_of(Source.GENERATED):
                around = None if prefix in self._generated else ip_network(prefix)
                if around is not None:
                    self._generated[prefix] = around
            else:
                around = self._generated.pop(prefix, None)
            if around is not None:
                touched |= {one for one in self._prefixes() if contains(around, ip_network(one))}
            elif self._rows.by("prefix").get(prefix):
                touched.add(prefix)
        self._settle(touched)

    def _prefixes(self) -> set[Prefix]:
        return {row.prefix for row in self._rows.all()}

    def _settle(self, prefixes: Iterable[Prefix]) -> None:
        """Update the claims of these prefixes. Raises OSError if the kernel refuses; the job repeats it."""
        for prefix in prefixes:
            rows = list(self._rows.by("prefix").get(prefix))
            base = self._others(prefix)
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
        self._identities.label_host(RESOURCE, frozenset[str]().union(*self._of_host.values()))

    def _known(self, prefix: Prefix, base: IpcacheEntry | None) -> Known:
        network = ip_network(prefix)
        world = (WORLD_IPV4 if network.version == 4 else WORLD_IPV6) if self._dual_stack else WORLD
        identity = self._identities.get(base.identity) if base is not None else None
        return Known(
            base.identity if base is not None else 0,
            identity.labels if identity is not None else (),
            tuple(self._around(network)),
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
        assert identity is not None  # noqa: S101  # this node gives it
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

    def _others(self, prefix: Prefix) -> IpcacheEntry | None:
        """The effective claim of other resources."""
        row = self._ipcache.table.get(prefix)
        return next((one for one in row.claims if one.resource != RESOURCE), None) if row else None

    def _around(self, network: IPNetwork) -> Iterator[str]:
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
