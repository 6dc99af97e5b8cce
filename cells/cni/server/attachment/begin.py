"""The first half of creating an endpoint, common to every ADD.

Needs: Endpoints.   Gives: Attachment, begun, NO_ENDPOINT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from cells.cni.server.attachment.edges import Endpoints
from cells.cni.server.attachment.undo import Undo, remove_endpoint
from cells.cni.server.protocol.errors import Explained
from cells.endpoint import Endpoint, EndpointError, EndpointRequest, NewEndpoint


class Attachment(msgspec.Struct, frozen=True):
    """An ADD whose endpoint has been begun."""

    new: NewEndpoint
    finish: Callable[[Endpoint], bytes]
    """What is left once the endpoint is complete; what the plugin prints. Raises CniError."""

    @property
    def identified(self) -> bool:
        """Whether it can be completed without waiting."""
        return self.new.identity is not None


NO_ENDPOINT: Final = Explained(EndpointError, "unable to create endpoint")


def begun(endpoints: Endpoints, request: EndpointRequest, undo: Undo) -> NewEndpoint:
    """Begin the endpoint; ``undo`` gets the opposite. Raises CniError, PoolEmpty."""
    with NO_ENDPOINT:
        new = endpoints.begin(request)
    undo.push("endpoint", partial(remove_endpoint, endpoints, new.endpoint))
    return new
