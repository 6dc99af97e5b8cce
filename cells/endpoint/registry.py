"""The registry of endpoints: their rows, the names to look them up by, and their status logs.

Source: Cilium 1.17, pkg/endpoint/id and pkg/endpointmanager.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

from msgspec.structs import replace

from cells.base.addresses import text_of
from cells.endpoint.model import (
    Code,
    Endpoint,
    EndpointError,
    IPAddress,
    State,
    StatusLog,
    Subject,
    TransitionOutcome,
    displayed,
    transition,
)
from lifecycle import Logger, Table

# Endpoint ids in text form: ``<prefix>:<rest>``.
#
# Source: Cilium 1.17, endpoint id prefixes.

LOCAL: Final = "cilium-local"
GLOBAL: Final = "cilium-global"
MAX_ENDPOINT_ID: Final = 65535
_NAMES: Final = frozenset(
    {
        "container-id",
        "cni-attachment-id",
        "docker-endpoint",
        "container-name",
        "pod-name",
        "cep-name",
        "ipv4",
        "ipv6",
    }
)


def parse_id(text: str) -> int | str:
    """Parse an endpoint id: a number, or a name under which endpoints are registered (:func:`names_of`).

    Raises EndpointError 400 for an unknown or unsupported prefix and for an invalid number.
    """
    prefix, colon, rest = text.partition(":")
    if not colon:
        return _number(text)
    if prefix == LOCAL:
        return _number(rest)
    if prefix == GLOBAL:
        raise EndpointError(400, "endpoint IDs with prefix cilium-global are not supported")
    if prefix not in _NAMES:
        raise EndpointError(400, f'unknown endpoint ID prefix "{prefix}"')
    if prefix in {"pod-name", "cep-name"}:
        rest = rest.replace(":", "/", 1)
    elif prefix in {"ipv4", "ipv6"}:
        try:
            rest = text_of(IPv4Address(rest) if prefix == "ipv4" else IPv6Address(rest))
        except AddressValueError as error:
            raise EndpointError(400, f'invalid IPv{prefix[-1]} address "{rest}"') from error
    return f"{prefix}:{rest}"


def _number(text: str) -> int:
    octal = len(text) > 1 and text[0] == "0" and text[1].isdigit()
    try:
        number = int(text, 8 if octal else 0)
    except ValueError as error:
        raise EndpointError(400, f'invalid numeric cilium id: "{text}" is not a number') from error
    if number < 0:
        raise EndpointError(400, f"invalid numeric cilium id: {number} is negative")
    if number > MAX_ENDPOINT_ID:
        raise EndpointError(400, f"endpoint id too large: {number}")
    return number


def address_name(address: IPAddress) -> str:
    """Return the name of an endpoint by one of its addresses, such as ``ipv4:10.0.1.77``."""
    return f"ipv{address.version}:{text_of(address)}"


def names_of(endpoint: Endpoint) -> list[str]:
    """Return the names under which an endpoint is registered.

    Legacy names (container id, container name, pod name) are omitted if the requester disables them: in a pod
    with several interfaces they are ambiguous.
    """
    names = []
    if endpoint.container_id:
        names.append(f"cni-attachment-id:{endpoint.attachment_id}")
    names.extend(map(address_name, endpoint.addresses))
    if endpoint.pod_name:
        names.append(f"cep-name:{endpoint.pod_namespace}/{endpoint.cep_name}")
    if not endpoint.disable_legacy_identifiers:
        if endpoint.container_id:
            names.append(f"container-id:{endpoint.container_id}")
        if endpoint.container_name:
            names.append(f"container-name:{endpoint.container_name}")
        if endpoint.pod_name:
            names.append(f"pod-name:{endpoint.pod}")
    return names


NAME: Final = "name"
CONTAINER: Final = "container"
INDEXES: Final[Mapping[str, Callable[[Endpoint], Iterable[Hashable]]]] = {
    NAME: names_of,
    CONTAINER: lambda endpoint: [endpoint.container_id] if endpoint.container_id else [],
}
"""Indexes of the ``endpoints`` table."""


class Registry:
    """The ``endpoints`` table and the status logs, updated together."""

    def __init__(self, table: Table[int, Endpoint], log: Logger) -> None:
        self.table = table
        self._log = log
        self._status: dict[int, StatusLog] = {}

    def get(self, endpoint_id: int) -> Endpoint | None:
        """Return the endpoint with this id, or None."""
        return self.table.get(endpoint_id)

    def lookup(self, id_text: str) -> Endpoint | None:
        """Return the endpoint with an id such as ``12`` or ``ipv4:10.0.1.77``, or None.

        Raises EndpointError 400 for an invalid id.
        """
        wanted = parse_id(id_text)
        return self.table.get(wanted) if isinstance(wanted, int) else self.named(wanted)

    def named(self, name: str) -> Endpoint | None:
        """Return the newest endpoint registered under ``prefix:rest``, or None."""
        found = self.table.by(NAME).get(name)
        return found[-1] if found else None

    def by_container(self, container_id: str) -> list[Endpoint]:
        """Return all endpoints of a container."""
        return self.table.by(CONTAINER).get(container_id)

    def check_unused(self, attachment: str, addresses: Iterable[IPAddress]) -> None:
        """Raise EndpointError 400 if an endpoint has the attachment id or one of the addresses.

        An empty attachment id is not checked.
        """
        names = self.table.by(NAME)
        if attachment and f"cni-attachment-id:{attachment}" in names:
            raise EndpointError(400, f"endpoint for CNI attachment ID {attachment} already exists")
        for name in map(address_name, addresses):
            if name in names:
                raise EndpointError(400, f"IP {name} is already in use")

    def add(self, endpoint: Endpoint) -> StatusLog:
        """Add the endpoint; return its new status log."""
        self.put(endpoint)
        return self.open_log(endpoint.id)

    def add_all(self, endpoints: Iterable[Endpoint]) -> list[StatusLog]:
        """Add endpoints in one transaction; return their status logs."""
        added = list(endpoints)
        with self.table.txn() as rows:
            for endpoint in added:
                rows.put(endpoint)
        return [self.open_log(endpoint.id) for endpoint in added]

    def open_log(self, endpoint_id: int) -> StatusLog:
        """Create an empty status log, before the endpoint is added."""
        status = self._status[endpoint_id] = StatusLog()
        return status

    def put(self, endpoint: Endpoint) -> None:
        """Replace the row of an endpoint."""
        self.table.put(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Remove the endpoint and its status log."""
        self.table.delete(endpoint.id)
        self._status.pop(endpoint.id, None)

    def status(self, endpoint_id: int) -> StatusLog:
        """Return the endpoint's status log; an empty one if the endpoint does not exist."""
        status = self._status.get(endpoint_id)
        return StatusLog() if status is None else status

    def shown_state(self, endpoint: Endpoint) -> State:
        """Return the state that the API shows: ``not-ready`` if ready with a status other than OK."""
        return displayed(endpoint.state, self.status(endpoint.id))

    def set_state(self, endpoint_id: int, state: State, reason: str) -> bool:
        """Set the endpoint's state if the transition is allowed; log the reason or the rejection."""
        endpoint = self.table.get(endpoint_id)
        with_state = None if endpoint is None else self.with_state(endpoint, state, reason)
        if with_state is not None:
            self.put(with_state)
        return with_state is not None

    def with_state(
        self, endpoint: Endpoint, state: State, reason: str, *, builder: bool = False
    ) -> Endpoint | None:
        """Return the row with another state, not stored yet; None if the transition is rejected.

        ``builder``: the transition is requested by a regeneration.
        """
        status = self._status[endpoint.id]
        match transition(endpoint.state, state, builder=builder):
            case TransitionOutcome.ACCEPTED:
                status.add(Code.OK, Subject.OTHER, reason, state)
                return replace(endpoint, state=state)
            case TransitionOutcome.SKIPPED:
                message = f"Skipped invalid state transition to {state} due to: {reason}"
                status.add(Code.WARNING, Subject.OTHER, message, endpoint.state)
                self._log.info(
                    "Invalid state transition skipped",
                    endpoint=endpoint.id,
                    state=endpoint.state.value,
                    wanted=state.value,
                    reason=reason,
                )
        return None
