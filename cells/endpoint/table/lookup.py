"""Endpoint ids as people and programs write them: ``<prefix>:<rest>``.

For:   Endpoints.lookup.   Needs: nothing.   Gives: parse_id, names_of.
Source: Cilium 1.17, endpoint id prefixes.
"""

from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

from cells.endpoint.table.model import Endpoint, EndpointError, IPAddress
from cells.ipam import text_of

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
    """The endpoint number, or the name under which the endpoint is registered (see :func:`names_of`).

    Raises EndpointError 400 for an unknown or unsupported prefix and for a bad number.
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
    """The name an endpoint has by one of its addresses."""
    return f"ipv{address.version}:{text_of(address)}"


def names_of(endpoint: Endpoint) -> list[str]:
    """The names an endpoint is registered under.

    The legacy ones (container id, container name, pod name) are left out where the requester says so:
    in a pod with several interfaces they are ambiguous.
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
