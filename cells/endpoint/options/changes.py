"""What can be changed of one endpoint while it lives: a user's labels, and whether its source is verified.

For:   PATCH of an endpoint's labels and options.   Needs: Endpoints, Regenerations.   Gives: EndpointChanges.
Source: Cilium 1.17, PATCH /endpoint/{id}/labels and /config.
"""

from collections.abc import Iterable

from cells.cluster.identity import Label
from cells.endpoint.manager import Endpoints
from cells.endpoint.options.relabel import labels_of
from cells.endpoint.regeneration.queue import Regenerations
from cells.endpoint.table.labels import EndpointLabels, of_pod, with_custom
from cells.endpoint.table.model import Endpoint
from cells.endpoint.table.states import Level


class EndpointChanges:
    """Changes an endpoint, and has it built; what went wrong with that is tried again."""

    def __init__(self, endpoints: Endpoints, regenerations: Regenerations) -> None:
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._keep = endpoints.identities.filter

    async def relabel(self, endpoint: Endpoint, wanted: Iterable[str]) -> str:
        """Make these all the labels that a user put on it; what its build failed with, if it did.

        Raises EndpointError 500.
        """
        custom = tuple(wanted)
        if not await self._endpoints.relabel(endpoint.id, lambda now: with_custom(now, custom, self._keep)):
            return ""
        return await self._built(endpoint, "updated security labels")

    def is_outdated(self, endpoint: Endpoint, labels: Iterable[Label] | None) -> bool:
        """Whether its pod's labels, if they are known, or its identity are no longer what it has."""
        if labels is not None and of_pod(endpoint, labels, self._keep) != labels_of(endpoint):
            return True
        return not self._endpoints.identities.stands_for(endpoint.identity, endpoint.labels)

    async def follow_pod(self, endpoint: Endpoint, labels: Iterable[Label] | None) -> str:
        """Make these the labels of its pod, what a user put on it stays; what its build failed with.

        None leaves the labels; an identity that does not stand for them any more is changed in any case.
        Raises EndpointError 500.
        """
        pod = None if labels is None else tuple(labels)

        def wanted(now: Endpoint) -> EndpointLabels:
            return labels_of(now) if pod is None else of_pod(now, pod, self._keep)

        if not await self._endpoints.relabel(endpoint.id, wanted):
            return ""
        return await self._built(endpoint, "updated security labels")

    async def verify_source(self, endpoint: Endpoint, verify: bool) -> str:
        """Have it send from its own addresses only, or from any; what its build failed with."""
        if endpoint.datapath.disable_sip_verification is not verify:
            return ""
        self._endpoints.verify_source(endpoint.id, verify)
        return await self._built(endpoint, "endpoint options changed via API")

    async def _built(self, endpoint: Endpoint, reason: str) -> str:
        return await self._regenerations.request(endpoint.id, Level.DATAPATH, reason).result()
