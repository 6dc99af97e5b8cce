"""Services as clients ask for them, in our words.

Needs: ServiceRequest.   Gives: requested, requested_backends.
Source: Cilium 1.17, PUT /service/{id}: 460 is a frontend that is none, 461 a backend.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from cells.api.models.services import BackendAddress, ServiceFlags, ServiceRequest
from cells.api.wire import FrameworkError
from cells.services.control import (
    INTERNAL,
    PROTOCOLS,
    Address,
    Backend,
    BackendState,
    FrontendKey,
    HandMade,
    ServiceName,
    ServiceType,
)
from lifecycle.http import Refusal

Meaning = TypeVar("Meaning")

BAD_FRONTEND, BAD_BACKEND = 460, 461
_STATES = {"": BackendState.ACTIVE} | {one.name.lower(): one for one in BackendState}
_TYPES = {"": ServiceType.CLUSTER_IP} | {one.text: one for one in ServiceType}
_POLICIES = {"": False, "Cluster": False, "Local": True}


def requested(body: ServiceRequest) -> HandMade:
    """The frontend that is asked for. Raises Refusal, or FrameworkError 422 for a word that is none."""
    given = body.frontend_address
    address = _address(BAD_FRONTEND, given.ip, given.port, given.protocol)
    flags = body.flags
    return HandMade(
        number=body.id,
        key=FrontendKey(address, INTERNAL if given.scope == "internal" else 0),
        type=_word(_TYPES, "type", flags.type),
        backends=requested_backends(body, address.protocol),
        name=ServiceName(flags.namespace, flags.name),
        ext_local=_ext_local(flags),
        int_local=_word(_POLICIES, "intTrafficPolicy", flags.int_traffic_policy),
    )


def requested_backends(body: ServiceRequest, protocol: int = 0) -> tuple[Backend, ...]:
    """The backends, of this protocol where they say none. Raises Refusal."""
    return tuple(_backend(one, protocol) for one in body.backend_addresses)


def _backend(given: BackendAddress, protocol: int) -> Backend:
    address = _address(BAD_BACKEND, given.ip, given.port or 0, given.protocol)
    state = _STATES.get(given.state)
    if state is None:
        raise Refusal(BAD_BACKEND, f"invalid backend state [{given.state}]")
    weight = given.weight or 0
    if not weight:
        state = BackendState.MAINTENANCE  # takes no new connections
    return Backend(
        address if address.protocol else Address(address.ip, address.port, protocol),
        state,
        given.node_name,
        weight=weight,
        zone=given.zone,
        preferred=given.preferred,
    )


def _address(status: int, text: str, port: int, protocol: str) -> Address:
    number = PROTOCOLS.get(protocol.upper()) if protocol.upper() not in {"", "NONE"} else 0
    if number is None:
        raise Refusal(status, f"unknown protocol {protocol!r}: expected TCP, UDP, SCTP or ANY")
    if not 0 <= port < 1 << 16:
        raise Refusal(status, f"invalid port {port}: expected 0 to 65535")
    return Address(_ip(status, text), port, number)


def _ip(status: int, text: str) -> IPv4Address | IPv6Address:
    if not text:
        raise FrameworkError(422, 602, "ip in body is required")
    try:
        return ip_address(text)
    except ValueError:
        raise Refusal(status, f"invalid IP address {text!r}") from None


def _ext_local(flags: ServiceFlags) -> bool:
    said = flags.ext_traffic_policy or flags.traffic_policy
    return _word(_POLICIES, "extTrafficPolicy", said)


def _word(known: dict[str, Meaning], name: str, text: str) -> Meaning:
    if text not in known:
        words = ", ".join(one for one in known if one)
        raise FrameworkError(422, 606, f"flags.{name} in body should be one of [{words}]")
    return known[text]
