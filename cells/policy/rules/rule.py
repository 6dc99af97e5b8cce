"""A rule as the engine computes with it: subjects and peers are selectors, ports are numbers or names."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from cells.policy.labels import PeerSelector, Prefix, Selector
from cells.policy.rules.schema import L7Rules, TLSContext

Direction = Literal["ingress", "egress"]
AuthMode = Literal["disabled", "required", "test-always-fail"]

ANY_PROTOCOL = 0
PROTOCOLS = {"ANY": 0, "ICMP": 1, "TCP": 6, "UDP": 17, "ICMPV6": 58, "SCTP": 132}
"""Protocol numbers by the names that policies use (IANA; 0 stands for any)."""


class Source(NamedTuple):
    """The object a rule comes from; equal sources replace one another."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


class PortRange(NamedTuple):
    """A port of a protocol, by number or name; ``end`` is the last of a range, 0 without one.

    Port 0 without a name is every port. For ICMP the port is the message's type.
    """

    protocol: int
    port: int
    name: str = ""
    end: int = 0


class ListenerReference(NamedTuple):
    """A listener by its qualified name, ``NAMESPACE/CONFIG/LISTENER``; priority 0 is none."""

    name: str
    priority: int = 0


class Above(msgspec.Struct, frozen=True, gc=False):
    """What a rule asks for above its ports, and of the traffic itself."""

    rules: L7Rules | None = None
    listener: ListenerReference | None = None
    server_names: tuple[str, ...] = ()
    terminating_tls: TLSContext | None = None
    originating_tls: TLSContext | None = None

    @property
    def parser(self) -> str:
        """The proxy that serves it: a protocol, ``tls`` for server names, ``crd`` for a listener, or none."""
        if self.listener is not None:
            return "crd"
        if self.rules is not None and not self.rules.empty:
            return self.rules.parser
        return "tls" if self.server_names else ""


class Ports(msgspec.Struct, frozen=True, gc=False):
    """One entry of ``toPorts``."""

    ranges: tuple[PortRange, ...]
    above: Above = Above()


class PeerRule(msgspec.Struct, frozen=True, gc=False):
    """One entry of a direction: peers and ports, allowed or denied.

    ``peers`` None restricts no peer; an empty tuple selects none. The first ``endpoint_peers`` of them are
    endpoint selectors, which ``requires`` of any rule narrow. ``ports`` None is every port; an empty tuple is
    none.
    """

    path: str
    peers: tuple[PeerSelector, ...] | None
    ports: tuple[Ports, ...] | None
    deny: bool = False
    auth: AuthMode | None = None
    endpoint_peers: int = 0
    requires: tuple[Selector, ...] = ()


class Unenforced(msgspec.Struct, frozen=True, gc=False):
    """A part of a rule that is not in force as it is written."""

    path: str
    reason: str
    instead: Literal[
        "allows nothing", "denies what it selects", "denies all that it could mean", "leaves nodes open"
    ]

    @property
    def text(self) -> str:
        """What is wrong, and what is in force meanwhile."""
        return f"{self.reason}; until that is mended, it {self.instead}"


class Rule(msgspec.Struct, frozen=True, gc=False):
    """One translated rule of an object."""

    source: Source
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
    """Parts that cannot be enforced as they are: they allow nothing, or deny all that they could mean."""

    def of(self, direction: Direction) -> tuple[PeerRule, ...]:
        """The entries of a direction."""
        return self.ingress if direction == "ingress" else self.egress

    def default_deny(self, direction: Direction) -> bool:
        """Whether what the direction does not allow is denied."""
        return self.ingress_default_deny if direction == "ingress" else self.egress_default_deny
