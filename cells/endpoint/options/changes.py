"""What can be changed of one endpoint while it lives: a user's labels, and whether its source is verified.

For:   PATCH of an endpoint's labels and options.   Needs: Endpoints, Regenerations.   Gives: EndpointChanges.
Source: Cilium 1.17, PATCH /endpoint/{id}/labels and /config.
"""

from collections.abc import Iterable

from cells.cluster.identity import Label
from cells.endpoint.labels import of_pod, with_custom
from cells.endpoint.manager import Endpoints
from cells.endpoint.model import Endpoint
from cells.endpoint.options.relabel import labels_of
from cells.endpoint.regeneration.queue import Regenerations
from cells.endpoint.states import Level


class EndpointChanges:
    """Changes an endpoint, and has it built; what went wrong with that is tried again."""

    def __init__(self, endpoints: Endpoints, regenerations: Regenerations) -> None:
        self._endpoints = endpoints
        self._regenerations = regenerations

    async def relabel(self, endpoint: Endpoint, wanted: Iterable[str]) -> str:
        """Make these all the labels that a user put on it; what its build failed with, if it did.

        Raises EndpointError 500.
        """
        custom = tuple(wanted)
        if not await self._endpoints.relabel(endpoint.id, lambda now: with_custom(now, custom)):
            return ""
        return await self._built(endpoint, "updated security labels")

    def differs(self, endpoint: Endpoint, labels: Iterable[Label] | None) -> bool:
        """Whether the labels of its pod, if there are any, give it others than it has."""
        return labels is not None and of_pod(endpoint, labels) != labels_of(endpoint)

    async def follow_pod(self, endpoint: Endpoint, labels: Iterable[Label]) -> str:
        """Make these the labels of its pod, what a user put on it stays; what its build failed with.

        Raises EndpointError 500.
        """
        pod = tuple(labels)
        if not await self._endpoints.relabel(endpoint.id, lambda now: of_pod(now, pod)):
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
