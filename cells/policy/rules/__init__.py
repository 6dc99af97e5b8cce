"""Translated rules, the options that change their meaning, and the errors of rejected objects.

``translate`` makes rules from policy objects (``schema``, ``network_policy``); ``compute`` makes policies
from rules. Pure values; no cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

import msgspec

from cells.policy.labels import Prefix
from cells.policy.rules.schema import ICMPField, L7Rules, PortProtocol, TLSContext
from cells.policy.selectors import PeerSelector, Selector

__all__ = [
    "PROTOCOLS",
    "SUPPORTED",
    "Direction",
    "PeerRule",
    "PolicyError",
    "PolicyOptions",
    "PortRange",
    "Rule",
    "RuleSource",
    "Unenforced",
]


# Errors of policy objects.

Stage = Literal["schema", "parse"]


class PolicyError(ValueError):
    """The object is rejected as a whole; its previous rules stay in force.

    ``stage`` is ``schema`` if the API server's schema rejects it, else ``parse``. ``path`` is the place in
    the object, e.g. ``spec.ingress[0].toPorts[0]``, empty for the whole object. ``reason`` is the message
    without it.
    """

    def __init__(self, reason: str, *, path: str = "", stage: Stage = "parse", prefix: str = "") -> None:
        super().__init__(f"{prefix}{reason}")
        self.reason = reason
        self.path = path
        self.stage: Stage = stage


class UnsupportedError(PolicyError):
    """An entry of a rule that Cilium supports and this agent does not; other entries stay in force."""


@contextmanager
def at(path: str) -> Iterator[None]:
    """Prefix the path of a raised PolicyError with ``path``."""
    try:
        yield
    except PolicyError as error:
        separator = "." if error.path and not error.path.startswith("[") else ""
        error.path = f"{path}{separator}{error.path}"
        raise


# Options that change the meaning of policies.


class PolicyOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that change the meaning of policies, named as in Cilium; defaults of Cilium's chart."""

    cluster_name: str = "default"
    enable_ipv4: bool = True
    enable_ipv6: bool = False
    enable_policy: Literal["default", "always", "never"] = "default"
    enforces_init: bool = True
    """Whether pods in ``init`` are default-deny; false if no source provides their labels."""
    allow_localhost: Literal["auto", "always", "policy"] = "auto"
    enable_host_firewall: bool = False
    dns_proxy_serves_host: bool = True
    """Whether the DNS proxy serves the node itself: ``rules.dns`` and ``toFQDNs`` with a nodeSelector."""
    enable_icmp_rules: bool = True
    enable_non_default_deny_policies: bool = True
    """Whether ``enableDefaultDeny: false`` has an effect; else every rule denies by default."""
    enable_l7_proxy: bool = True
    enable_node_selector_labels: bool = False
    cidr_matches_pods: bool = False
    """Whether CIDR rules select pods by their addresses (``policy-cidr-match-mode``)."""
    has_dns_proxy: bool = True
    """Whether a DNS proxy observes the addresses of names, which ``toFQDNs`` selects."""
    supports_all_parsers: bool = True
    """Whether a proxy supports more than HTTP: Kafka, other protocols, server names, TLS, listeners."""
    supports_authentication: bool = True
    """Whether mutual authentication is supported."""

    @property
    def dual_stack(self) -> bool:
        """Whether the world has one identity per IP family."""
        return self.enable_ipv4 and self.enable_ipv6

    @property
    def always_allows_localhost(self) -> bool:
        """Whether the node reaches its pods under every policy; ``auto`` means always with Kubernetes."""
        return self.allow_localhost != "policy"


SUPPORTED = PolicyOptions(
    dns_proxy_serves_host=False, supports_all_parsers=False, supports_authentication=False
)
"""The options of this agent, whatever its settings."""


# Validation of label keys, with Kubernetes' messages.
#
# Source: k8s.io/apimachinery/pkg/util/validation, IsQualifiedName.

_NAME_FORM: Final = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_NAME: Final = re.compile(_NAME_FORM)
_SUBDOMAIN_FORM: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_SUBDOMAIN: Final = re.compile(_SUBDOMAIN_FORM)
_CONSISTS: Final = (
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric"
    f" character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{_NAME_FORM}')"
)
_SUBDOMAIN_CONSISTS: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must"
    " start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is"
    f" '{_SUBDOMAIN_FORM}')"
)


def label_name_error(text: str) -> str | None:
    """Return the error of an invalid label key, in Kubernetes' words; None for a valid key."""
    prefix, slash, name = text.rpartition("/")
    if "/" in prefix:
        return (
            f"a qualified name {_CONSISTS} with an optional DNS subdomain prefix and '/'"
            " (e.g. 'example.com/MyName')"
        )
    if slash and (wrong := _label_prefix_error(prefix)):
        return f"prefix part {wrong}"
    if not name:
        return "name part must be non-empty"
    if len(name) > 63:
        return "name part must be no more than 63 bytes"
    return None if _NAME.fullmatch(name) else f"name part {_CONSISTS}"


def _label_prefix_error(prefix: str) -> str | None:
    if not prefix:
        return "must be non-empty"
    if len(prefix) > 253:
        return "must be no more than 253 bytes"
    return None if _SUBDOMAIN.fullmatch(prefix) else _SUBDOMAIN_CONSISTS


# Rules: subjects and peers are selectors, ports are numbers or names.

Direction = Literal["ingress", "egress"]
AuthMode = Literal["disabled", "required", "test-always-fail"]

PROTOCOLS = {"ANY": 0, "ICMP": 1, "TCP": 6, "UDP": 17, "ICMPV6": 58, "SCTP": 132}
"""Protocol numbers by the names that policies use (IANA; 0 stands for any)."""


class RuleSource(NamedTuple):
    """The object that a rule comes from. An object replaces one with an equal source."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


class PortRange(NamedTuple):
    """A port of a protocol, by number or name; ``end`` is the last port of a range, else 0.

    Port 0 without a name is every port. For ICMP the port is the message type.
    """

    protocol: int
    port: int
    name: str = ""
    end: int = 0


class ListenerReference(msgspec.Struct, frozen=True):
    """A listener by its qualified name, ``NAMESPACE/CONFIG/LISTENER``; priority 0 means none."""

    name: str
    priority: int = 0


class L7Settings(msgspec.Struct, frozen=True, gc=False):
    """L7 rules, listener, server names and TLS settings of a ``toPorts`` entry."""

    rules: L7Rules | None = None
    listener: ListenerReference | None = None
    server_names: tuple[str, ...] = ()
    terminating_tls: TLSContext | None = None
    originating_tls: TLSContext | None = None

    @property
    def parser(self) -> str:
        """The L7 parser: a protocol, ``tls`` for server names, or ``crd`` for a listener; else empty."""
        if self.listener is not None:
            return "crd"
        if self.rules is not None and not self.rules.empty:
            return self.rules.parser
        return "tls" if self.server_names else ""


class Ports(msgspec.Struct, frozen=True, gc=False):
    """One entry of ``toPorts``."""

    ranges: tuple[PortRange, ...]
    l7: L7Settings = L7Settings()


class PeerRule(msgspec.Struct, frozen=True, gc=False):
    """One entry of a direction: peers and ports, allowed or denied.

    ``peers`` None restricts no peer; an empty tuple selects none. The first ``endpoint_peers`` of them are
    endpoint selectors, which the ``requires`` of all rules restrict. ``ports`` None is every port; an empty
    tuple is none.
    """

    path: str
    peers: tuple[PeerSelector, ...] | None
    ports: tuple[Ports, ...] | None
    deny: bool = False
    auth: AuthMode | None = None
    endpoint_peers: int = 0
    requires: tuple[Selector, ...] = ()


class Unenforced(msgspec.Struct, frozen=True, gc=False):
    """A part of a rule that is not enforced as written, and the effect it has instead."""

    path: str
    reason: str
    instead: Literal[
        "allows nothing",
        "denies everything that it selects",
        "denies everything that it might select",
        "leaves nodes open",
    ]

    @property
    def text(self) -> str:
        """The reason, and the effect until it is corrected."""
        return f"{self.reason}; until it is corrected, it {self.instead}"


class Rule(msgspec.Struct, frozen=True, gc=False):
    """One translated rule of an object."""

    source: RuleSource
    subject: Selector
    selects_nodes: bool
    ingress: tuple[PeerRule, ...]
    egress: tuple[PeerRule, ...]
    ingress_default_deny: bool
    egress_default_deny: bool
    labels: tuple[str, ...]
    path: str
    prefixes: frozenset[Prefix] = frozenset()
    groups: frozenset[str] = frozenset()
    uses_services: bool = False
    description: str = ""
    unenforced: tuple[Unenforced, ...] = ()
    """Parts that cannot be enforced as written: they allow nothing, or deny everything they might select."""
    features: frozenset[str] = frozenset()
    """Features that the rule uses, by the names of metrics; see RuleSpec.features()."""

    def of(self, direction: Direction) -> tuple[PeerRule, ...]:
        """Return the entries of a direction."""
        return self.ingress if direction == "ingress" else self.egress

    def default_deny(self, direction: Direction) -> bool:
        """Whether traffic of the direction is denied unless an entry allows it."""
        return self.ingress_default_deny if direction == "ingress" else self.egress_default_deny


# Numbers of ports, protocols and ICMP types.
#
# Source: RFC 6335 §5.1 (service names), IANA's ICMP and ICMPv6 parameters.

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
    """Whether the text is a port name: at most 15 letters, digits and single hyphens, with a letter."""
    return len(text) <= 15 and _SERVICE_NAME.fullmatch(text) is not None


def port_number(text: str) -> int:
    """Parse a port number as Go's ParseUint with base 0. Raises PolicyError."""
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
    """Return one range per protocol; ANY stands for TCP, UDP and SCTP. Raises PolicyError."""
    name, number = (port.port.lower(), 0) if is_service_name(port.port) else ("", port_number(port.port))
    if not name and number == 0 and 0 < port.end_port < MAX_PORT:
        number = 1  # port 0 in a policy map's key means every port; no packet comes from or to port 0
    end = port.end_port if port.end_port > number or name else 0
    if not name and number == 0:
        end = 0
    protocols = ("TCP", "UDP", "SCTP") if port.protocol == "ANY" else (port.protocol,)
    return [PortRange(PROTOCOLS[protocol], number, name, end) for protocol in protocols]


def icmp_type(field: ICMPField) -> PortRange:
    """Return an ICMP type as the port of its protocol. Raises PolicyError for an unknown name."""
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
    """Return the fewest port prefixes, as (port, bits), that cover a range exactly, in order.

    Every port (port 0 without an end, or up to 65535) is one prefix of 0 bits; a single port has 16 bits.
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
