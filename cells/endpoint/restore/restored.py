"""Decides which old endpoints are restored, claims their resources, and removes stale state.

Addresses, ids, policy maps, identities and ipcache prefixes are claimed before anything is allocated. The
kernel state of a restored endpoint is not written here, as its pod uses it.

Source: Cilium 1.17, restoreOldEndpoints.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain

import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from cells.cluster.identity.identities import Identities, Identity
from cells.cluster.identity.numbers import INIT_LABELS
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Prefix, prefix_of
from cells.config.shared import PodRouting
from cells.endpoint import (
    Endpoint,
    IPAddress,
    SavedEndpoint,
    Scan,
    StateFiles,
    resource_of,
    restored_claims,
)
from cells.endpoint.restore.interfaces import LxcRow, RestoreAddresses, RestoreLinks, StaleMaps
from cells.endpoint.restore.stale_state import RetainedState, StaleStateCleanup, alias_owner, validation_error
from cells.netlink.rows import LinkInfo
from cells.node.ipam.ranges import IpamError
from cells.policy.maps import EndpointPolicies
from lifecycle import Health, HiveError, Hook, Lifecycle, Logger, NotStartedError

# The endpoints of the previous agent, from the state directory.
#
# Source: Cilium 1.17, fetching old endpoints (disk only).


class OldEndpoints:
    """The saved endpoints, read in its start hook and not validated yet."""

    def __init__(self, files: StateFiles, lifecycle: Lifecycle, health: Health, log: Logger) -> None:
        self._files = files
        self._health = health.child("read")
        self._log = log
        self._scan: Scan | None = None
        lifecycle.append(Hook("read old endpoints", self._fetch))

    @property
    def scan(self) -> Scan:
        """The result of the scan. Raises NotStartedError before the hook has run."""
        if self._scan is None:
            raise NotStartedError("OldEndpoints.scan was read before the hook 'read old endpoints' ran")
        return self._scan

    async def _fetch(self) -> None:
        scan = await anyio.to_thread.run_sync(self._files.scan)
        for name in scan.removed:
            self._log.info("directory of an interrupted write removed", directory=name)
        for name in scan.ignored:
            self._log.warning("second state directory of an endpoint ignored", directory=name)
        for number, why in scan.unreadable.items():
            self._log.warning("Unable to read endpoint state, ignoring", endpoint=number, error=why)
        if scan.unreadable:
            self._health.degraded(f"state of endpoints {', '.join(map(str, scan.unreadable))} cannot be read")
        else:
            self._health.ok(f"{len(scan.endpoints)} endpoints read")
        self._scan = scan


ENDPOINTS_PER_STEP = 100
"""Endpoints restored between two yields to the event loop: about 5 ms."""


class QuarantinedEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that could not be restored although its pod runs."""

    number: int
    ifindex: int
    """Index of its link: while the link exists, the endpoint's state is not changed."""
    identity: int
    addresses: tuple[IPAddress, ...]
    """Addresses reserved for it."""
    has_policy_map: bool
    """Whether its id and policy map were adopted."""
    prefixes: tuple[Prefix, ...]
    """Prefixes claimed for it in the ipcache."""


class EndpointClaims:
    """Claims resources of old endpoints: addresses, policy maps, identities, ipcache prefixes."""

    def __init__(
        self,
        ipcache: Ipcache,
        policies: EndpointPolicies,
        addresses: RestoreAddresses,
        identities: Identities,
        log: Logger,
    ) -> None:
        self._ipcache = ipcache
        self._initializer = ipcache.table.initializer("endpoint-restore")
        self._policies = policies
        self._addresses = addresses
        self._identities = identities
        self._log = log
        self._prefixes: dict[int, list[IpcacheEntry]] = {}
        """Entries of the next batch to the ipcache, by endpoint id."""

    def covers(self, address: IPAddress) -> bool:
        """Whether the node's pod CIDRs contain the address."""
        return self._addresses.covers(address)

    def claim(self, endpoint: Endpoint) -> None:
        """Claim addresses, id and policy map of an endpoint.

        Raises IpamError, HiveError or OSError, with nothing claimed. An address of a disabled family or
        outside the node's pod CIDRs is reserved, so that a CIDR added later does not allocate it.
        claim_prefixes() claims the prefixes.
        """
        addresses = self._addresses
        on = [ip for ip in endpoint.addresses if addresses.covers(ip)]
        with ExitStack() as undo:
            for owned in () if endpoint.datapath.external_ipam else on:
                pool = endpoint.pool_of(owned) or addresses.default_pool
                try:
                    addresses.allocate(owned, f"{endpoint.title} [restored]", pool)
                except IpamError as error:
                    raise IpamError(error.status, f"Failed to re-allocate IP of endpoint: {error}") from error
                undo.callback(addresses.release, owned, pool)
            for stray in () if endpoint.datapath.external_ipam else set(endpoint.addresses).difference(on):
                addresses.hold(stray, f"{endpoint.title} [restored]")
                undo.callback(addresses.release, stray, addresses.default_pool)
            self._policies.adopt(endpoint.id)
            undo.pop_all()
        self._prefixes[endpoint.id] = restored_claims(endpoint.id, endpoint.identity, endpoint.addresses)

    async def identify(self, endpoint: Endpoint) -> Identity:
        """Return the identity of the endpoint's labels: the previous one, unless the cluster has another."""
        return await self._identities.acquire(endpoint.labels or INIT_LABELS, previous=endpoint.identity)

    def quarantine(
        self, number: int, ifindex: int, identity: int, ips: list[IPAddress]
    ) -> QuarantinedEndpoint:
        """Claim the resources of an endpoint that is not restored; log failures."""
        adopted = False
        try:
            self._policies.adopt(number)
            adopted = True
        except (HiveError, OSError) as error:
            self._log.warning(
                "policy map of a quarantined endpoint not adopted", endpoint=number, error=str(error)
            )
        self._prefixes[number] = restored_claims(number, identity, ips)
        self.claim_prefixes()
        addresses = tuple(ip for ip in ips if self._reserve(number, ip))
        self._identities.hold(identity)
        return QuarantinedEndpoint(number, ifindex, identity, addresses, adopted, tuple(map(prefix_of, ips)))

    def release_steps(self, quarantined: QuarantinedEndpoint) -> Iterator[Callable[[], object]]:
        """Yield the functions that release the resources claimed by quarantine()."""
        yield partial(self._ipcache.withdraw, resource_of(quarantined.number), quarantined.prefixes)
        yield partial(self._identities.release_hold, quarantined.identity)
        for ip in quarantined.addresses:
            yield partial(self._addresses.release, ip, self._addresses.default_pool)
        if quarantined.has_policy_map:
            yield partial(self._policies.release, quarantined.number)

    def claim_prefixes(self) -> None:
        """Write the collected prefixes to the ipcache in one batch; unchanged entries are not written."""
        wanted, self._prefixes = self._prefixes, {}
        try:
            self._ipcache.upsert(*chain.from_iterable(wanted.values()))
        except OSError:  # one prefix may have failed: upsert by endpoint, so that the others have entries
            for number, claims in wanted.items():
                self._claim_one(number, claims)

    def done(self) -> None:
        """Finish: all prefixes are claimed, so the ipcache may remove other entries."""
        self._initializer.done()

    def _claim_one(self, number: int, claims: Iterable[IpcacheEntry]) -> None:
        try:
            self._ipcache.upsert(*claims)
        except OSError as error:  # the endpoint's regeneration claims them again
            self._log.warning(
                "ipcache entries of a restored endpoint not written", endpoint=number, error=str(error)
            )

    def _reserve(self, number: int, address: IPAddress) -> bool:
        """Reserve the address for a quarantined endpoint; log a failure and return whether it succeeded."""
        if not self._addresses.covers(address):
            self._addresses.hold(address, f"endpoint {number} [quarantined]")
            return True
        try:
            self._addresses.allocate(
                address, f"endpoint {number} [quarantined]", self._addresses.default_pool
            )
        except IpamError as error:
            self._log.warning(
                "address of a quarantined endpoint not reserved in IPAM", endpoint=number, error=str(error)
            )
            return False
        return True


class RestoredEndpoints:
    """Restores endpoints: its hook claims their addresses, ids, policy maps and identities."""

    def __init__(
        self,
        old: OldEndpoints,
        claims: EndpointClaims,
        stale_maps: StaleMaps,
        links: RestoreLinks,
        cleanup: StaleStateCleanup,
        routing: PodRouting,
        *,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._old = old
        self._claims = claims
        self._stale_maps = stale_maps
        self._links = links
        self._cleanup = cleanup
        self._endpoint_routes = routing.endpoint_routes
        self._health = health.child("restore")
        self._log = log
        self.endpoints: list[Endpoint] = []
        """The restored endpoints; empty before the hook has run."""
        self.quarantined: dict[int, QuarantinedEndpoint] = {}
        """Running endpoints that could not be restored; QuarantinedEndpoints releases them."""
        self.failed: dict[int, str] = {}
        """Errors of endpoints that could not be restored, by id."""
        self._stale: set[int] = set()
        """Failed endpoints without a running pod: created incompletely, or deleted."""
        self._policy_map_errors: dict[int, str] = {}
        """Errors of opening endpoints' policy maps, by id."""
        self._recreated: list[int] = []
        """Endpoints that their owners create anew at each start."""
        lifecycle.append(Hook("restore endpoints", self._restore))

    def addresses_outside_pod_cidrs(self) -> list[IPAddress]:
        """Return addresses of restored pods outside the node's pod CIDRs, without endpoint routes."""
        ours = (
            endpoint
            for endpoint in self.endpoints
            if not (endpoint.datapath.is_chained or endpoint.datapath.install_endpoint_route)
        )
        return [ip for endpoint in ours for ip in endpoint.addresses if not self._claims.covers(ip)]

    async def _restore(self) -> None:
        started = time.perf_counter()
        scan = self._old.scan
        lxc_rows = self._stale_maps.addresses()
        links = self._links.links()
        await self._prepare([*scan.endpoints, *scan.unreadable])
        by_name = {link.name: link for link in links}
        for position, (number, saved) in enumerate(sorted(scan.endpoints.items())):
            await self._restore_endpoint(number, saved, by_name)
            if position % ENDPOINTS_PER_STEP == ENDPOINTS_PER_STEP - 1:
                self._claims.claim_prefixes()
                await anyio.lowlevel.checkpoint()
        self._claims.claim_prefixes()
        by_index = {link.ifindex: link for link in links}
        reasons = dict.fromkeys(scan.unreadable, "its state cannot be read") | self._policy_map_errors
        for number, reason in reasons.items():
            self._quarantine(number, [row for row in lxc_rows if row.endpoint_id == number], by_index, reason)
        if outside := self.addresses_outside_pod_cidrs():
            self._log.warning(
                "restored pods keep addresses outside the node's pod CIDRs until they are removed",
                addresses=", ".join(map(str, outside)),
            )
        retained = self._retained(lxc_rows)
        self._stale_maps.keep_addresses(retained.addresses)
        self._claims.done()
        errors = await self._cleanup.run(retained, lxc_rows, links, [*self.failed, *self._recreated])
        self._report(started, errors)

    async def _prepare(self, numbers: list[int]) -> None:
        """Recreate missing policy maps; an endpoint that fails here fails alone later."""
        try:
            await self._stale_maps.prepare_policies(numbers)
        except (HiveError, OSError) as error:
            self._log.warning("policy maps of old endpoints not prepared", error=str(error))

    def _report(self, started: float, errors: list[str]) -> None:
        took = round((time.perf_counter() - started) * 1000, 1)
        self._log.info(
            "Endpoints restored", restored=len(self.endpoints), failed=len(self.failed), milliseconds=took
        )
        stale = {number: self.failed[number] for number in sorted(self._stale)}
        failed = {number: why for number, why in sorted(self.failed.items()) if number not in stale}
        summary = f"{len(self.endpoints)} restored, {len(failed)} failed, {took} ms"
        if failed:
            summary += f"; failed: {_reasons(failed)}"
        if stale:
            summary += f"; removed as stale: {_reasons(stale)}"
        if self.quarantined:
            summary += f"; quarantined: {sorted(self.quarantined)}"
        if errors:
            summary += f"; not removed: {'; '.join(errors)}"
        if failed or self.quarantined or errors:
            self._health.degraded(summary)
        else:
            self._health.ok(summary)

    def _retained(self, lxc_rows: list[LxcRow]) -> RetainedState:
        quarantined = {one.ifindex for one in self.quarantined.values()}
        return RetainedState(
            addresses=frozenset(
                [address for endpoint in self.endpoints for address in endpoint.addresses]
                + [
                    row.ip
                    for row in lxc_rows
                    if row.ifindex in quarantined and row.endpoint_id in self.quarantined
                ]
            ),
            links=frozenset([endpoint.ifindex for endpoint in self.endpoints] + list(quarantined)),
            undecided=frozenset([*self._old.scan.unreadable, *self._policy_map_errors]),
        )

    async def _restore_endpoint(self, number: int, saved: SavedEndpoint, links: dict[str, LinkInfo]) -> None:
        """Restore one endpoint, or record why it cannot be restored."""
        endpoint = saved.endpoint
        if saved.is_fake or endpoint.is_reserved:
            self._recreated.append(number)
            return
        if not endpoint.ifindex and endpoint.ifname in links:  # not saved: found by name, as in Cilium
            endpoint = replace(endpoint, ifindex=links[endpoint.ifname].ifindex)
        fault = validation_error(endpoint, links)
        if fault is not None:
            self._stale.add(number)
        else:
            try:
                self._claims.claim(endpoint)
            except IpamError as error:
                fault = str(error)
            except (HiveError, OSError) as error:  # keep the state: the next start may succeed
                self._policy_map_errors[number] = str(error)
                return
            else:
                identity = await self._claims.identify(endpoint)
                if identity.id != endpoint.identity:
                    was, now = endpoint.identity, identity.id
                    self._log.info("identity of restored endpoint changed", endpoint=number, old=was, new=now)
                restored = replace(
                    endpoint,
                    identity=identity.id,
                    labels=identity.labels,
                    datapath=endpoint.datapath.with_endpoint_routes(wanted=self._endpoint_routes),
                )
                self.endpoints.append(restored)
                return
        self.failed[number] = fault
        if number in self._stale:  # for example, its DEL came while no agent ran
            self._log.info("stale endpoint removed", endpoint=number, pod=endpoint.title, reason=fault)
        else:
            self._log.warning(
                "Unable to restore endpoint, ignoring", endpoint=number, pod=endpoint.title, error=fault
            )

    def _quarantine(self, number: int, rows: list[LxcRow], links: dict[int, LinkInfo], reason: str) -> None:
        """Quarantine an endpoint that is not restored, if its link and map entries exist."""
        attached = [row for row in rows if not row.is_host and row.ifindex in links]
        if not attached:
            if rows:
                self.failed[number] = f"{reason}, and its interface no longer exists"
            return
        link, identity = links[attached[0].ifindex], attached[0].identity
        if alias_owner(link.alias) not in {None, number}:
            return
        ips = [row.ip for row in attached]
        self.quarantined[number] = self._claims.quarantine(number, link.ifindex, identity, ips)
        self._log.warning(
            "endpoint not restored: quarantined until its link is removed",
            endpoint=number,
            reason=reason,
            addresses=", ".join(map(str, ips)),
            interface=link.name,
        )


def _reasons(why: Mapping[int, str]) -> str:
    return ", ".join(f"endpoint {number} ({reason})" for number, reason in why.items())
