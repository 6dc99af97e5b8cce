"""Identities of API servers' addresses: their label beside those the address has by other claims.

For:    the ipcache. Needs: Table[EndpointSlice], Ipcache, Identities, EndpointPolicies.
Gives:  ApiServerClaims, addresses_of(), outside_labels().
Source: Cilium 1.17, the ipcache's metadata: labels of all sources of a prefix are merged.

The host stays the host and gets the label, another node becomes identity 7, a pod stays a pod. What is
outside has an identity of this node's own, with the labels of the nearest prefix that rules name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Iterator
from functools import partial
from ipaddress import ip_network
from typing import Final

import msgspec

from cells.cluster.identity import (
    HOST,
    KUBE_APISERVER,
    REMOTE_NODE,
    RESERVED_IDENTITIES,
    WORLD,
    WORLD_IPV4,
    WORLD_IPV6,
    Identities,
    Scope,
    scope_of,
)
from cells.cluster.ipcache import Ipcache, IpcacheEntry, Prefix, Source
from cells.config import AgentConfig
from cells.ipam import IPNetwork
from cells.kubernetes import EndpointSlice
from cells.policy.maps import EndpointPolicies
from lifecycle import Change, Jobs, Logger, Table

SERVICE: Final = ("default", "kubernetes")
RESOURCE: Final = "endpointslices/default/kubernetes"
"""Whose the claims are in the ipcache."""
LABEL: Final = "reserved:kube-apiserver"


def addresses_of(slices: Iterable[EndpointSlice]) -> Iterator[IPNetwork]:
    """The addresses of API servers that answer."""
    for one in slices:
        for endpoint in one.endpoints or ():
            if endpoint.conditions.ready is not False:
                for text in endpoint.addresses or ():
                    try:
                        yield ip_network(text)
                    except ValueError:  # of type FQDN, or nonsense
                        continue


def outside_labels(prefix: IPNetwork, around: Iterable[str], *, dual_stack: bool) -> tuple[str, ...]:
    """The labels of an API server outside of the cluster; ``around`` are those of the nearest prefix."""
    world = (WORLD_IPV4 if prefix.version == 4 else WORLD_IPV6) if dual_stack else WORLD
    return tuple(sorted({LABEL, *RESERVED_IDENTITIES[world], *around}))


def contains(outer: IPNetwork, inner: IPNetwork) -> bool:
    """Whether every address of ``inner`` lies in ``outer``."""
    return outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]  # of one version


class ApiServerClaims:
    """Keeps the claims. Until the slices are known no leftover of the map goes for want of one."""

    def __init__(
        self,
        slices: Table[EndpointSlice],
        ipcache: Ipcache,
        identities: Identities,
        policies: EndpointPolicies,
        agent: AgentConfig,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._slices = slices
        self._ipcache = ipcache
        self._identities = identities
        self._policies = policies
        self._dual_stack = agent.ipv4 and agent.ipv6
        self._log = log
        self._servers: set[IPNetwork] = set()
        self._server_prefixes: dict[str, IPNetwork] = {}
        """The same, as the ipcache names them."""
        self._claimed: dict[IPNetwork, IpcacheEntry] = {}
        self._generated: dict[Prefix, IPNetwork] = {}
        """Prefixes that rules name."""
        self._first = ipcache.table.initializer("kube-apiserver")
        jobs.observe("API servers", self._rounds, self._follow_slices)
        claims = partial(ipcache.table.changes, only=self._matters)
        jobs.observe("claims of others", claims, self._follow_claims)

    async def _rounds(self) -> AsyncIterator[None]:
        """Once at the beginning, then after every change."""
        await self._slices.wait_initialized()
        changes = self._slices.changes(self._slices.revision)
        yield
        async for _ in changes:
            yield

    async def _follow_slices(self, _: None) -> None:
        servers = set(addresses_of(self._slices.by("service").get(SERVICE)))
        if servers != self._servers:
            changed, self._servers = servers ^ self._servers, servers
            self._server_prefixes = {str(one): one for one in servers}
            self._log.info("addresses of API servers", addresses=sorted(map(str, servers)))
            self._settle(changed)
        self._first.done()

    def _matters(self, key: Hashable, old: IpcacheEntry | None, row: IpcacheEntry | None) -> bool:
        """Whether rules name the prefix, or did, or an API server has it."""
        of_rules = any(one is not None and one.is_of(Source.GENERATED) for one in (old, row))
        return of_rules or str(key) in self._server_prefixes

    async def _follow_claims(self, changes: list[Change[IpcacheEntry]]) -> None:
        touched: set[IPNetwork] = set()
        for change in changes:
            prefix = str(change.key)
            if change.row is not None and change.row.is_of(Source.GENERATED):
                around = None if prefix in self._generated else ip_network(prefix)
                if around is not None:
                    self._generated[prefix] = around
            else:
                around = self._generated.pop(prefix, None)
            if around is not None:
                touched |= {one for one in self._servers if contains(around, one)}
            elif prefix in self._server_prefixes:
                touched.add(self._server_prefixes[prefix])
        if touched:
            self._settle(touched)

    def _settle(self, prefixes: Iterable[IPNetwork]) -> None:
        """Claim what these should have now. Raises OSError where the kernel refuses: it is tried again."""
        for prefix in prefixes:
            if (labels := self._labels(prefix)) is not None:
                self._claim(prefix, labels)
            elif (claimed := self._claimed.pop(prefix, None)) is not None:
                self._identities.release(claimed.identity)
                self._ipcache.withdraw(RESOURCE, [str(prefix)])
        at_home = any(self._identity_of_others(one) == HOST for one in self._servers)
        self._identities.label_host("kube-apiserver", [LABEL] if at_home else ())

    def _labels(self, prefix: IPNetwork) -> tuple[str, ...] | None:
        """Those of the identity the prefix should have; None where it has that of other claims."""
        if prefix not in self._servers:
            return None
        number = self._identity_of_others(prefix)
        if number == REMOTE_NODE:
            return RESERVED_IDENTITIES[KUBE_APISERVER]
        if scope_of(number) is Scope.REMOTE_NODE:  # a node whose labels count
            node = self._identities.get(number)
            return tuple(sorted({LABEL, *(node.labels if node is not None else ())}))
        if number and scope_of(number) is not Scope.LOCAL:
            return None  # this node, or a pod
        return outside_labels(prefix, self._around(prefix), dual_stack=self._dual_stack)

    def _claim(self, prefix: IPNetwork, labels: tuple[str, ...]) -> None:
        claimed = self._claimed.get(prefix)
        identity = self._identities.acquire_now(labels)
        assert identity is not None  # noqa: S101  # this node gives it
        claim = IpcacheEntry(
            prefix=str(prefix), identity=identity.id, source=Source.KUBE_APISERVER, resource=RESOURCE
        )
        if (base := self._others(prefix)) is not None:
            claim = msgspec.structs.replace(
                claim,
                tunnel_endpoint=base.tunnel_endpoint,
                encrypt_key=base.encrypt_key,
                skip_tunnel=base.skip_tunnel,
            )
        try:
            if claim != claimed:
                self._policies.introduce(identity.id, identity.labels)
                self._ipcache.upsert(claim)
                self._claimed[prefix] = claim
        finally:
            taken = self._claimed.get(prefix) is claim
            former = claimed if taken else claim
            if former is not None:
                self._identities.release(former.identity)

    def _others(self, prefix: IPNetwork) -> IpcacheEntry | None:
        """The strongest claim that is not ours."""
        row = self._ipcache.table.get(str(prefix))
        return next((one for one in row.claims if one.resource != RESOURCE), None) if row else None

    def _identity_of_others(self, prefix: IPNetwork) -> int:
        base = self._others(prefix)
        return base.identity if base is not None else 0

    def _around(self, prefix: IPNetwork) -> Iterator[str]:
        """The labels of the nearest prefix around it that rules name, without those of the world."""
        found = [one for one in self._generated.values() if contains(one, prefix)]
        for nearest in sorted(found, key=lambda one: -one.prefixlen):
            row = self._ipcache.table.get(str(nearest))
            claims = [one for one in row.claims if one.source is Source.GENERATED] if row else []
            for claim in claims:
                if (known := self._identities.get(claim.identity)) is not None:
                    yield from (text for text in known.labels if not text.startswith("reserved:"))
                    return
