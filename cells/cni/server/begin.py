"""The first half of an endpoint, as every ADD makes it.

Needs: Endpoints.   Gives: Attachment, begun, explained_endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from cells.cni.server.edges import Endpoints
from cells.cni.server.errors import CniError
from cells.cni.server.undo import Undo, remove_endpoint
from cells.endpoint import Endpoint, EndpointError, EndpointRequest, NewEndpoint


@dataclass(frozen=True, slots=True)
class Attachment:
    """An ADD whose endpoint has been begun."""

    new: NewEndpoint
    finish: Callable[[Endpoint], bytes]
    """What is left once the endpoint is complete; what the plugin prints. Raises CniError."""

    @property
    def identified(self) -> bool:
        """Whether it can be completed without waiting."""
        return self.new.identity is not None


@contextmanager
def explained_endpoint() -> Iterator[None]:
    """Tell the runtime why there is no endpoint."""
    try:
        yield
    except EndpointError as error:
        raise CniError(f"unable to create endpoint: {error.text}") from error


def begun(endpoints: Endpoints, request: EndpointRequest, undo: Undo) -> NewEndpoint:
    """Begin the endpoint; ``undo`` gets the opposite. Raises CniError, PoolEmpty."""
    with explained_endpoint():
        new = endpoints.begin(request)
    undo.push("endpoint", partial(remove_endpoint, endpoints, new.endpoint))
    return new
