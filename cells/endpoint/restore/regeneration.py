"""Lists the restored endpoints in one transaction, then regenerates them.

Also releases resources of quarantined endpoints once their links are deleted.

Source: Cilium 1.17, regenerateRestoredEndpoints.
"""

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import anyio

from cells.endpoint import EndpointMaps, Endpoints, RegenerationLevel, Regenerations, StateFiles
from cells.endpoint.restore.interfaces import LinkEvents, PreviousAgent, RestoreLinks, StaleMaps
from cells.endpoint.restore.restored import EndpointClaims, QuarantinedEndpoint, RestoredEndpoints
from cells.node.ipam.ranges import IpamError
from cells.policy.maps import KnownRemoteClusters, KnownRules, RealizedPolicy
from lifecycle import Health, HiveError, Hook, Jobs, Lifecycle, Logger, Table, after

RULES_SECONDS: Final = 2.0
"""Seconds that the start waits for rules, before it leaves the regeneration to a job."""


class ExposedEndpoints:
    """Lists the restored endpoints, in state restoring, in its start hook."""

    def __init__(self, restored: RestoredEndpoints, endpoints: Endpoints, lifecycle: Lifecycle) -> None:
        self._restored = restored
        self._endpoints = endpoints
        lifecycle.append(Hook("expose endpoints", self._expose))

    async def _expose(self) -> None:
        self._endpoints.expose(self._restored.endpoints)


@after(ExposedEndpoints)
class RegeneratedEndpoints:
    """Regenerates the restored endpoints in its start hook; failed ones are retried."""

    def __init__(
        self,
        restored: RestoredEndpoints,
        endpoints: Endpoints,
        regenerations: Regenerations,
        rules: KnownRules | None,
        remote: KnownRemoteClusters | None,
        previous: PreviousAgent | None,
        realized: Table[int, RealizedPolicy],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._required = [one for one in (rules, remote) if one is not None]
        self._previous = previous
        self._jobs = jobs
        self._restored = restored
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._health = health.child("regenerate")
        self._log = log
        self._realized = realized.initializer("restored endpoints")
        lifecycle.append(Hook("regenerate endpoints", self._start))

    async def _start(self) -> None:
        """Regenerate; if rules are late, pods keep their policies until a job regenerates them."""
        if self._required and self._restored.endpoints:
            with anyio.move_on_after(RULES_SECONDS) as waiting:
                await self._all_received()
            if waiting.cancelled_caught:
                await self._regenerate_later()
                return
        await self._regenerate()

    async def _all_received(self) -> None:
        for one in self._required:
            await one.known()

    async def _regenerate_later(self) -> None:
        missing = ", ".join(one.missing for one in self._required if one.missing)
        count = len(self._restored.endpoints)
        self._log.warning(
            "restored endpoints keep their policies until all rules are received",
            endpoints=count,
            missing=missing,
        )
        self._health.degraded(f"{count} restored endpoints keep their policies until received: {missing}")

        async def later() -> None:
            await self._all_received()
            await self._regenerate()

        self._jobs.one_shot("regenerate restored endpoints", later)

    async def _regenerate(self) -> None:
        started = time.perf_counter()
        restored = self._restored.endpoints
        requested = [
            self._regenerations.request(endpoint.id, RegenerationLevel.DATAPATH, "syncing state to host")
            for endpoint in restored
        ]
        try:
            unsuccessful = [one.endpoint_id for one in requested if await one.result()]
        finally:
            self._realized.done()
        failed = [number for number in unsuccessful if self._endpoints.get(number) is not None]
        took = round((time.perf_counter() - started) * 1000, 1)
        self._log.info(
            "Finished regenerating restored endpoints",
            regenerated=len(restored) - len(unsuccessful),
            total=len(restored),
            milliseconds=took,
        )
        self._release_previous(failed)
        summary = f"{len(restored) - len(unsuccessful)} of {len(restored)} regenerated in {took} ms"
        if released := len(unsuccessful) - len(failed):
            summary += f", {released} removed meanwhile"
        if failed:
            self._health.degraded(f"{summary}; failed, retried: endpoints {', '.join(map(str, failed))}")
        else:
            self._health.ok(summary)

    def _release_previous(self, failed: Collection[int]) -> None:
        """Detach programs of Cilium's agent, except from pods without our programs."""
        if self._previous is None:
            return
        waiting = {one.ifindex for one in self._restored.endpoints if one.id in failed}
        try:
            self._previous.release_previous(
                waiting | {one.ifindex for one in self._restored.quarantined.values()}
            )
        except OSError as error:
            self._log.warning(
                "programs of Cilium's agent not detached: restart the agent to retry", error=str(error)
            )


# Quarantined endpoints keep their resources until their links are removed.


class QuarantinedEndpoints:
    """Releases resources of quarantined endpoints once their links are deleted.

    The job ends with the last one.
    """

    def __init__(
        self,
        restored: RestoredEndpoints,
        claims: EndpointClaims,
        maps: EndpointMaps,
        stale_maps: StaleMaps,
        links: RestoreLinks,
        events: LinkEvents,
        files: StateFiles,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._restored = restored
        self._claims = claims
        self._maps = maps
        self._stale_maps = stale_maps
        self._links = links
        self._events = events
        self._files = files
        self._health = health.child("quarantined")
        self._log = log
        jobs.one_shot("release addresses of quarantined endpoints", self._watch)

    async def _watch(self) -> None:
        quarantined = self._restored.quarantined
        if not quarantined:
            return
        async with self._events.removals() as removed:
            while quarantined:
                present = {link.ifindex for link in self._links.links()}
                for number in [number for number, one in quarantined.items() if one.ifindex not in present]:
                    await self._release(quarantined.pop(number))
                if quarantined:
                    self._health.degraded(f"endpoints not restored, left unchanged: {sorted(quarantined)}")
                    await removed()
        self._health.ok("no endpoint is quarantined")

    async def _release(self, released: QuarantinedEndpoint) -> None:
        """Remove all state of the endpoint; a failed step does not stop the next ones."""
        number = released.number
        rows = [row for row in self._stale_maps.addresses() if row.endpoint_id == number and not row.is_host]
        steps: list[Callable[[], object]] = [
            *(partial(self._stale_maps.drop_address, row.ip, number) for row in rows),
            *self._claims.release_steps(released),
            partial(self._stale_maps.drop_config, released.ifindex),
            partial(self._files.remove, number),
        ]
        for step in steps:
            self._try_step(number, step)
        await self._maps.scrub_conntrack(released.addresses)
        addresses = ", ".join(map(str, released.addresses))
        self._log.info(
            "quarantined endpoint removed: its link no longer exists", endpoint=number, addresses=addresses
        )

    def _try_step(self, number: int, step: Callable[[], object]) -> None:
        try:
            step()
        except (OSError, HiveError, IpamError) as error:
            self._log.warning(
                "step of the removal of a quarantined endpoint failed", endpoint=number, error=str(error)
            )
