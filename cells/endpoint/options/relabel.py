"""Gives an endpoint that lives other labels, and the identity they stand for, without a gap in its traffic.

For:   Endpoints.   Needs: the registry, Identities, what makes the kernel follow.   Gives: Relabel.
Source: Cilium 1.17, change of an endpoint's identity.

The new identity is in the policy maps of every peer before the endpoint's packets carry it, and the old one
leaves them after: a flow that both allow loses no packet.
"""

from collections.abc import Callable

import anyio
from msgspec.structs import replace

from cells.cluster.identity import Identities, Identity, NoIdentityError
from cells.endpoint.table import reasons
from cells.endpoint.table.labels import EndpointLabels
from cells.endpoint.table.model import Endpoint, EndpointError
from cells.endpoint.table.registry import Registry
from cells.endpoint.table.states import State


class Relabel:
    """Changes labels; ``carry`` makes the kernel follow a row, and raises OSError where it refuses."""

    def __init__(
        self, registry: Registry, identities: Identities, carry: Callable[[Endpoint], object]
    ) -> None:
        self._registry = registry
        self._identities = identities
        self._carry = carry

    async def run(self, endpoint_id: int, wanted: Callable[[Endpoint], EndpointLabels]) -> bool:
        """Have the endpoint have the labels ``wanted`` of it; whether anything changed.

        It waits for the identity as long as it takes, and goes on with the one it has until then; what
        changes meanwhile is taken into account. The state file follows with the next build. Raises
        EndpointError 500, with nothing changed, when no identity is left, or the kernel refuses.
        """
        asked = self._registry.get(endpoint_id)
        if asked is None or (
            labels_of(asked) == wanted(asked) and self._identities.stands_for(asked.identity, asked.labels)
        ):
            return False
        resolving = self._registry.set_state(endpoint_id, State.WAITING_FOR_IDENTITY, reasons.RELABELLED)
        outcome = reasons.NOT_IDENTIFIED
        try:
            while (now := self._still(asked)) is not None:
                labels = wanted(now)
                identity = await self._identities.acquire(labels.identity)
                await self._let_others_know(identity)
                if self._applied(asked, identity, labels, wanted):
                    outcome = reasons.IDENTIFIED
                    return True
        except (NoIdentityError, OSError) as error:
            raise EndpointError(500, str(error)) from error
        finally:
            if resolving and self._still(asked) is not None:
                self._registry.set_state(endpoint_id, State.READY, outcome)
        return False

    async def _let_others_know(self, identity: Identity) -> None:
        """Wait while other nodes may not know it yet: they cannot be asked, and would drop its packets."""
        if (seconds := self._identities.grace(identity.id)) > 0:
            try:
                await anyio.sleep(seconds)
            except BaseException:
                self._identities.release(identity.id)
                raise

    def _applied(
        self,
        asked: Endpoint,
        identity: Identity,
        labels: EndpointLabels,
        wanted: Callable[[Endpoint], EndpointLabels],
    ) -> bool:
        """Give it the identity, unless it is gone or other labels are wanted now; raises OSError."""
        before = self._still(asked)
        if before is None or wanted(before) != labels:
            self._identities.release(identity.id)
            return False
        changed = replace(
            before,
            labels=labels.identity,
            info_labels=labels.info,
            custom_labels=labels.custom,
            identity=identity.id,
        )
        try:
            self._carry(changed)
        except OSError:
            self._back(before)
            self._identities.release(identity.id)
            raise
        self._registry.put(changed)
        self._identities.release(before.identity)
        return True

    def _back(self, before: Endpoint) -> None:
        try:
            self._carry(before)
        except OSError:  # what is wrong now is put right by the endpoint's next build and the maps' sweeps
            return

    def _still(self, asked: Endpoint) -> Endpoint | None:
        """The endpoint, unless it is gone; another one may have its number."""
        now = self._registry.get(asked.id)
        return now if now is not None and now.created == asked.created else None


def labels_of(endpoint: Endpoint) -> EndpointLabels:
    """The labels it has."""
    return EndpointLabels(endpoint.labels, endpoint.info_labels, endpoint.custom_labels)
