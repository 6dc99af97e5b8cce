"""Ports, protocols and ICMP types as numbers.

Source: RFC 6335 §5.1 (service names), IANA's ICMP and ICMPv6 parameters.
"""

from __future__ import annotations

import re

from cells.policy.rules.errors import PolicyError
from cells.policy.rules.rule import PROTOCOLS, PortRange
from cells.policy.rules.schema import ICMPField, PortProtocol

MAX_PORT = 65535
_SERVICE_NAME = re.compile(r"(?:[a-zA-Z0-9]-?)*[a-zA-Z](?:-?[a-zA-Z0-9])*")
_NUMBERS = {"0x": 16, "0b": 2, "0o": 8}

ICMP_TYPES = {
    "IPv4": {
        "EchoReply": 0,
        "DestinationUnreachable": 3,
        "Redirect": 5,
        "Echo": 8,
        "EchoRequest": 8,
        "RouterAdvertisement": 9,
        "RouterSelection": 10,
        "TimeExceeded": 11,
        "ParameterProblem": 12,
        "Timestamp": 13,
        "TimestampReply": 14,
        "Photuris": 40,
        "ExtendedEchoRequest": 42,
        "ExtendedEchoReply": 43,
    },
    "IPv6": {
        "DestinationUnreachable": 1,
        "PacketTooBig": 2,
        "TimeExceeded": 3,
        "ParameterProblem": 4,
        "EchoRequest": 128,
        "EchoReply": 129,
        "MulticastListenerQuery": 130,
        "MulticastListenerReport": 131,
        "MulticastListenerDone": 132,
        "RouterSolicitation": 133,
        "RouterAdvertisement": 134,
        "NeighborSolicitation": 135,
        "NeighborAdvertisement": 136,
        "RedirectMessage": 137,
        "RouterRenumbering": 138,
        "ICMPNodeInformationQuery": 139,
        "ICMPNodeInformationResponse": 140,
        "InverseNeighborDiscoverySolicitation": 141,
        "InverseNeighborDiscoveryAdvertisement": 142,
        "HomeAgentAddressDiscoveryRequest": 144,
        "HomeAgentAddressDiscoveryReply": 145,
        "MobilePrefixSolicitation": 146,
        "MobilePrefixAdvertisement": 147,
        "DuplicateAddressRequestCodeSuffix": 157,
        "DuplicateAddressConfirmationCodeSuffix": 158,
        "ExtendedEchoRequest": 160,
        "ExtendedEchoReply": 161,
    },
}


def is_service_name(text: str) -> bool:
    """Whether a port's text is a name: at most 15 letters, digits and single hyphens, one letter at least."""
    return len(text) <= 15 and _SERVICE_NAME.fullmatch(text) is not None


def port_number(text: str) -> int:
    """A port's number, in the notations that Go's ParseUint takes with base 0. Raises PolicyError."""
    base = _NUMBERS.get(text[:2].lower(), 8 if len(text) > 1 and text.startswith("0") else 10)
    digits = text[2:] if text[:2].lower() in _NUMBERS else text
    try:
        number = int(digits, base) if digits.isalnum() and digits.isascii() else -1
    except ValueError:
        number = -1
    if number < 0:
        raise PolicyError(f'Unable to parse port: strconv.ParseUint: parsing "{text}": invalid syntax')
    if number > MAX_PORT:
        raise PolicyError(f'Unable to parse port: strconv.ParseUint: parsing "{text}": value out of range')
    return number


def port_ranges(port: PortProtocol) -> list[PortRange]:
    """One range for each protocol that is meant; ANY is TCP, UDP and SCTP. Raises PolicyError."""
    name, number = (port.port.lower(), 0) if is_service_name(port.port) else ("", port_number(port.port))
    if not name and number == 0 and 0 < port.end_port < MAX_PORT:
        number = 1  # port 0 in a policy map's key means every port; no packet comes from or to port 0
    end = port.end_port if port.end_port > number or name else 0
    if not name and number == 0:
        end = 0
    protocols = ("TCP", "UDP", "SCTP") if port.protocol == "ANY" else (port.protocol,)
    return [PortRange(PROTOCOLS[protocol], number, name, end) for protocol in protocols]


def icmp_type(field: ICMPField) -> PortRange:
    """An ICMP type as the port of its protocol. Raises PolicyError for a name that the family has not."""
    number = field.type
    if isinstance(number, str):
        if number.isdecimal():
            number = int(number)
        else:
            known = ICMP_TYPES[field.family].get(number)
            if known is None:
                raise PolicyError(f"ICMP type {number} not found in {field.family}")
            number = known
    if not 0 <= number <= 255:
        raise PolicyError(f"ICMP type {number} is out of range: 0 to 255")
    return PortRange(PROTOCOLS["ICMP" if field.family == "IPv4" else "ICMPV6"], number)


def masked_ports(port: int, end: int) -> list[tuple[int, int]]:
    """A range of ports as (port, prefix length in bits), the fewest that cover it exactly, in order.

    Every port (0, without end or up to the last) is one prefix of no bits; a single port is one of 16.
    """
    if port == 0 and end in (0, MAX_PORT):
        return [(0, 0)]
    if end <= port:
        return [(port, 16)]
    prefixes = []
    first = port
    while first <= end:
        size = first & -first or 1 << 16
        while size > end - first + 1:
            size >>= 1
        prefixes.append((first, 17 - size.bit_length()))
        first += size
    return prefixes
