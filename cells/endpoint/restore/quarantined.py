"""Endpoints that run but could not be restored: what they have stays theirs until their link goes.

For:   the node, which must not give a running pod's address to another one.
Needs: RestoredEndpoints (which finds them), the edges, Jobs.   Gives: QuarantinedEndpoints.
"""

from collections.abc import Callable
from functools import partial

from cells.cluster.identity import Identities
from cells.cluster.ipcache import Ipcache
from cells.endpoint import EndpointMaps, StateFiles, resource_of
from cells.endpoint.restore.edges import LinkEvents, RestoreAddresses, RestoreLinks, StaleMaps
from cells.endpoint.restore.restored import QuarantinedEndpoint, RestoredEndpoints
from cells.ipam import IpamError
from cells.policy.maps import EndpointPolicies
from lifecycle import Health, HiveError, Jobs, Logger


class QuarantinedEndpoints:
    """Frees what quarantined endpoints have, once their links are gone; the job ends with the last one."""

    def __init__(
        self,
        restored: RestoredEndpoints,
        ipcache: Ipcache,
        *,
        maps: EndpointMaps,
        policies: EndpointPolicies,
        left: StaleMaps,
        links: RestoreLinks,
        events: LinkEvents,
        addresses: RestoreAddresses,
        identities: Identities,
        files: StateFiles,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._restored = restored
        self._ipcache = ipcache
        self._maps = maps
        self._policies = policies
        self._left = left
        self._links = links
        self._events = events
        self._addresses = addresses
        self._identities = identities
        self._files = files
        self._health = health.child("quarantined")
        self._log = log
        jobs.one_shot("free what quarantined endpoints had", self._watch)

    async def _watch(self) -> None:
        kept = self._restored.quarantined
        if not kept:
            return
        async with self._events.removals() as removed:
            while kept:
                present = {link.ifindex for link in self._links.links()}
                for number in [number for number, one in kept.items() if one.ifindex not in present]:
                    await self._free(kept.pop(number))
                if kept:
                    self._health.degraded(f"not restored, left alone: endpoints {sorted(kept)}")
                    await removed()
        self._health.ok("no endpoint is left that was not restored")

    async def _free(self, gone: QuarantinedEndpoint) -> None:
        """Take every step of a delete, whatever becomes of the others."""
        number = gone.number
        rows = [row for row in self._left.addresses() if row.endpoint_id == number and not row.is_host]
        steps: list[Callable[[], object]] = [
            *(partial(self._left.drop_address, row.ip, number) for row in rows),
            partial(self._ipcache.withdraw, resource_of(number), gone.prefixes),
            partial(self._left.drop_config, gone.ifindex),
            partial(self._identities.unhold, gone.identity),
            partial(self._files.remove, number),
            *(partial(self._addresses.release, ip, self._addresses.default_pool) for ip in gone.addresses),
        ]
        if gone.has_policy_map:
            steps.append(partial(self._policies.release, number))
        for step in steps:
            self._take(number, step)
        await self._maps.forget_flows(gone.addresses)
        addresses = ", ".join(map(str, gone.addresses))
        self._log.info("pod of a quarantined endpoint no longer exists", endpoint=number, addresses=addresses)

    def _take(self, number: int, step: Callable[[], object]) -> None:
        try:
            step()
        except (OSError, HiveError, IpamError) as error:
            self._log.warning("endpoint left something behind", endpoint=number, error=str(error))
