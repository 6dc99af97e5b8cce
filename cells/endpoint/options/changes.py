"""What can be changed of one endpoint while it lives: a user's labels, and whether its source is verified.

For:   PATCH of an endpoint's labels and options.   Needs: Endpoints, Regenerations.   Gives: EndpointChanges.
Source: Cilium 1.17, PATCH /endpoint/{id}/labels and /config.
"""

from collections.abc import Iterable

from cells.cluster.identity import RESERVED, Label, is_identity_label, parse, texts
from cells.endpoint.manager import Endpoints
from cells.endpoint.model import Endpoint, EndpointError
from cells.endpoint.regeneration.queue import Regenerations
from cells.endpoint.states import Level


def relabelled(endpoint: Endpoint, wanted: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The endpoint's labels once a user wants these on it, and those of them that are a user's.

    A label whose key the pod has already changes nothing, nor does one that makes no identity. Raises
    EndpointError 500 for reserved ones that are added or taken away.
    """
    before, after = set(map(parse, endpoint.custom_labels)), set(map(parse, wanted))
    reserved = texts(label for label in before ^ after if label.source == RESERVED)
    if reserved:
        raise EndpointError(500, f"Not allowed to add reserved labels: {','.join(reserved)}")
    own = [parse(text) for text in endpoint.pod_labels]
    keys = {label.key for label in own}
    custom: dict[str, Label] = {
        label.key: label
        for label in sorted(after)
        if label.key and label.key not in keys and is_identity_label(label)
    }
    return texts([*own, *custom.values()]), texts(custom.values())


class EndpointChanges:
    """Changes an endpoint, and has it built; what went wrong with that is tried again."""

    def __init__(self, endpoints: Endpoints, regenerations: Regenerations) -> None:
        self._endpoints = endpoints
        self._regenerations = regenerations

    async def relabel(self, endpoint: Endpoint, wanted: Iterable[str]) -> str:
        """Make these all the labels that a user put on it; what its build failed with, if it did.

        Raises EndpointError 500.
        """
        labels, custom = relabelled(endpoint, wanted)
        if (labels, custom) == (endpoint.labels, endpoint.custom_labels):
            return ""
        await self._endpoints.relabel(endpoint.id, labels, custom)
        return await self._built(endpoint, "updated security labels")

    async def verify_source(self, endpoint: Endpoint, verify: bool) -> str:
        """Have it send from its own addresses only, or from any; what its build failed with."""
        if endpoint.datapath.disable_sip_verification is not verify:
            return ""
        self._endpoints.verify_source(endpoint.id, verify)
        return await self._built(endpoint, "endpoint options changed via API")

    async def _built(self, endpoint: Endpoint, reason: str) -> str:
        return await self._regenerations.request(endpoint.id, Level.DATAPATH, reason).result()
