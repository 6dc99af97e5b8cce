"""What a BGP speaker is to do, and what it reports: the rows that controller, speaker and presentation share.

Why:    the controller writes what is wanted without a speaker at hand, and what makes a speaker equal to it
        needs no Kubernetes. One instance is one speaker: it has an ASN, a router ID and a RIB of its own.
Source: RFC 4271; 4760 (families), 1997 and 8092 (communities), 4724 and 8538 (graceful restart), 2385 (MD5),
        5082 (TTL); Cilium 1.17, BGP control plane: names of route policies and of states.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple, Protocol

import msgspec

from cells.base.addresses import IPAddress, IPNetwork
from lifecycle import ReadTable, Secret, Table

__all__ = [
    "ALLOW_LOCAL",
    "IPV4_UNICAST",
    "IPV6_UNICAST",
    "NOT_LISTENING",
    "AfiSafi",
    "AnnouncedPath",
    "BGPFault",
    "BGPInstance",
    "BGPPeer",
    "FamilyCounts",
    "HeldPeer",
    "IsolatedPeer",
    "ListedRoute",
    "ObservedPeer",
    "PeerRestart",
    "PeerState",
    "PeerTimers",
    "PolicyDirection",
    "PolicyStatement",
    "PrefixMatch",
    "RouteListing",
    "RoutePolicy",
    "RouteTable",
    "SpeakerName",
    "WantedSpeakers",
    "bgp_faults",
    "held_peers",
    "instance_table",
    "isolated_peers",
    "observed_peers",
    "path_table",
    "peer_table",
    "policy_table",
    "without_zone",
]


class AfiSafi(NamedTuple):
    """A family of routes, in the words of Cilium's resources: ``ipv4`` and ``unicast``."""

    afi: str
    safi: str

    def __str__(self) -> str:
        return f"{self.afi}-{self.safi}"


IPV4_UNICAST: Final = AfiSafi("ipv4", "unicast")
IPV6_UNICAST: Final = AfiSafi("ipv6", "unicast")

NOT_LISTENING: Final = -1
"""The listening port of a speaker that only dials."""
ALLOW_LOCAL: Final = "allow-local"
"""The import policy of every instance: routes of its own alone. What peers send is in no RIB."""


# What is wanted.


class BGPInstance(msgspec.Struct, frozen=True):
    """A speaker. A change of any field but the name starts it anew, with all its sessions."""

    name: str
    local_asn: int
    router_id: IPv4Address
    listen_port: int = NOT_LISTENING


class SpeakerName(NamedTuple):
    """A gobgpd: that of an instance, or one of its own that a peer of the instance has."""

    instance: str
    peer: str = ""
    """Its address; empty for that of the instance."""

    def __str__(self) -> str:
        return f"{self.instance}, peer {self.peer}" if self.peer else self.instance

    @property
    def fields(self) -> dict[str, str]:
        """As a line of the log has it."""
        return {"instance": self.instance} | ({"peer": self.peer} if self.peer else {})


class PeerTimers(msgspec.Struct, frozen=True):
    """Of a session, in seconds."""

    connect_retry: int = 120
    hold: int = 90
    keepalive: int = 30


class PeerRestart(msgspec.Struct, frozen=True):
    """Graceful restart as the restarting speaker, with Notifications (RFC 8538); families take part, too."""

    enabled: bool = False
    restart_time: int = 120
    """How long a peer keeps routes without a session, in seconds."""


class BGPPeer(msgspec.Struct, frozen=True):
    """A session that an instance dials. Another name, address or ASN is another session."""

    instance: str
    name: str
    address: IPAddress
    """Of an instance no two peers have the same."""
    asn: int
    local_asn: int
    """Of its instance."""
    local_address: IPAddress | None = None
    """None: the kernel chooses."""
    local_port: int = 0
    """0: the kernel chooses."""
    remote_port: int = 179
    password: Secret | None = None
    """Of TCP MD5 (RFC 2385)."""
    timers: PeerTimers = PeerTimers()
    multihop_ttl: int = 1
    """More than 1 matters for external peers alone."""
    graceful_restart: PeerRestart = PeerRestart()
    families: tuple[AfiSafi, ...] = (IPV6_UNICAST, IPV4_UNICAST)

    @property
    def external(self) -> bool:
        """Whether it is of another AS (eBGP)."""
        return self.asn != self.local_asn

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address


class PolicyDirection(StrEnum):
    """Which way routes pass a policy."""

    IMPORT = "import"
    EXPORT = "export"


class PrefixMatch(NamedTuple):
    """Prefixes within a network, of these lengths."""

    cidr: IPNetwork
    min_length: int
    max_length: int

    def __contains__(self, prefix: object) -> bool:
        """Whether a network is one of them."""
        return (
            isinstance(prefix, type(self.cidr))
            and self.min_length <= prefix.prefixlen <= self.max_length
            and prefix.subnet_of(self.cidr)  # type: ignore[arg-type]  # both are of the same version
        )


class PolicyStatement(msgspec.Struct, frozen=True):
    """Accepts routes that match all of these, and adds to them. Without a match of a sort any fits."""

    neighbors: tuple[IPAddress, ...] = ()
    """Without zones: see without_zone()."""
    prefixes: tuple[PrefixMatch, ...] = ()
    """Sorted."""
    local_routes: bool = False
    """Only routes that the speaker was given."""
    communities: tuple[int, ...] = ()
    """RFC 1997, each 32 bits."""
    large_communities: tuple[tuple[int, int, int], ...] = ()
    """RFC 8092."""
    local_preference: int | None = None
    """For internal peers; None adds none."""


def without_zone(address: IPAddress) -> IPAddress:
    """The address of a peer as policies match it: ``fe80::1`` of ``fe80::1%eth0``."""
    return IPv6Address(int(address)) if getattr(address, "scope_id", None) else address


class RoutePolicy(msgspec.Struct, frozen=True):
    """A policy of an instance: the first statement that matches accepts; what no policy accepts is rejected.

    The default of both directions is to reject.
    """

    instance: str
    name: str
    direction: PolicyDirection
    statements: tuple[PolicyStatement, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Instance and name."""
        return self.instance, self.name


class AnnouncedPath(msgspec.Struct, frozen=True):
    """A route in an instance's RIB: ORIGIN IGP, and the next hop is left to the session."""

    instance: str
    prefix: IPNetwork

    @property
    def key(self) -> tuple[str, IPNetwork]:
        """Instance and prefix."""
        return self.instance, self.prefix


def instance_table() -> Table[str, BGPInstance]:
    """Instances by name."""
    return Table("bgp-instances", key=lambda row: row.name)


def peer_table() -> Table[tuple[str, IPAddress], BGPPeer]:
    """Peers by instance and address."""
    return Table("bgp-peers", key=lambda row: row.key)


def policy_table() -> Table[tuple[str, str], RoutePolicy]:
    """Policies by instance and name."""
    return Table("bgp-policies", key=lambda row: row.key)


def path_table() -> Table[tuple[str, IPNetwork], AnnouncedPath]:
    """Paths by instance and prefix."""
    return Table("bgp-paths", key=lambda row: row.key)


class WantedSpeakers(NamedTuple):
    """All that speakers are to do. They agree with each other whenever they are read without an await.

    Each is initialized once every source is known: before that, absence means nothing, and nothing that a
    speaker has may be withdrawn.
    """

    instances: ReadTable[str, BGPInstance]
    """By name."""
    peers: ReadTable[tuple[str, IPAddress], BGPPeer]
    """By instance and address."""
    policies: ReadTable[tuple[str, str], RoutePolicy]
    """By instance and name."""
    paths: ReadTable[tuple[str, IPNetwork], AnnouncedPath]
    """By instance and prefix."""


# What is observed.


class PeerState(StrEnum):
    """The state of a session (RFC 4271 section 8.2.2), in the words of Cilium's API."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    CONNECT = "connect"
    ACTIVE = "active"
    OPEN_SENT = "open_sent"
    OPEN_CONFIRM = "open_confirm"
    ESTABLISHED = "established"


class FamilyCounts(msgspec.Struct, frozen=True):
    """Routes of a family over a session."""

    family: AfiSafi
    received: int = 0
    accepted: int = 0
    advertised: int = 0


class ObservedPeer(msgspec.Struct, frozen=True):
    """A session as its speaker reports it: a row of the table ``bgp-observed-peers``."""

    instance: str
    address: IPAddress
    asn: int
    local_asn: int
    remote_port: int
    state: PeerState
    established_at: datetime | None = None
    """With time zone UTC; None while it is not established."""
    hold_time: int = 0
    """As negotiated, in seconds; 0 before the session was up."""
    keepalive: int = 0
    """As negotiated, in seconds; 0 before the session was up."""
    families: tuple[FamilyCounts, ...] = ()
    capabilities: tuple[str, ...] = ()
    """Those that the peer announced, by name."""
    router_id: str = ""
    """The peer's; empty before it was known."""
    sessions: int = 0
    """How often it was established since its speaker runs."""
    error: str = ""
    """Why the session ended last, as far as the speaker knows."""
    isolated_at: datetime | None = None
    """When it got a speaker of its own, with time zone UTC; None: it has not."""
    crashes: int = 0
    """Of its own speaker, lately."""

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address

    @property
    def established(self) -> bool:
        """Whether routes can be exchanged."""
        return self.state is PeerState.ESTABLISHED


def observed_peers() -> Table[tuple[str, IPAddress], ObservedPeer]:
    """Sessions by instance and address; the speaker writes them."""
    return Table("bgp-observed-peers", key=lambda row: row.key)


class IsolatedPeer(msgspec.Struct, frozen=True):
    """A peer with a gobgpd of its own, until its configuration changes: a row of ``bgp-isolated-peers``."""

    instance: str
    address: IPAddress
    configuration: str
    """A hash of it, without the password."""
    since: datetime
    crashes: int = 0
    """Of its own gobgpd; after two hours without one they count anew."""
    last: datetime | None = None
    """When it crashed last."""
    counted: datetime | None = None
    """Time of the last line before this crash in gobgpd's log, by which an agent knows it again."""

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address


def isolated_peers() -> Table[tuple[str, IPAddress], IsolatedPeer]:
    """Isolated peers by instance and address."""
    return Table("bgp-isolated-peers", key=lambda row: row.key)


class HeldPeer(msgspec.Struct, frozen=True):
    """A peer without a session for a while: a row of the table ``bgp-held-peers``."""

    instance: str
    address: IPAddress
    crashes: int
    """Of gobgpd, as far as they are put down to it."""
    until: datetime
    isolated: bool = False
    """Whether that gobgpd is its own."""

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address

    @property
    def error(self) -> str:
        """Why it has no session."""
        times = "crashed" if self.crashes == 1 else f"crashed {self.crashes} times"
        until = f"held down until {self.until:%H:%M:%S} UTC"
        if self.isolated:
            return f"{until}: its own gobgpd {times} by messages of this peer"
        return f"{until}: gobgpd {times}, probably by a message of this peer, and no further one may run"


def held_peers() -> Table[tuple[str, IPAddress], HeldPeer]:
    """Held peers by instance and address."""
    return Table("bgp-held-peers", key=lambda row: row.key)


class BGPFault(msgspec.Struct, frozen=True):
    """What cannot be done of what resources ask for: a row of the table ``bgp-faults``."""

    instance: str
    """Empty where it concerns all."""
    subject: str
    """The object and the part of it: ``CiliumBGPPeerConfig/rack0``, ``peer tor-1``."""
    error: str
    """What was found, what was expected, and what follows."""

    @property
    def key(self) -> tuple[str, str, str]:
        """All of it: a subject may have several."""
        return self.instance, self.subject, self.error


def bgp_faults() -> Table[tuple[str, str, str], BGPFault]:
    """Faults by all they are."""
    return Table("bgp-faults", key=lambda row: row.key)


# What is listed for those who look.


class RouteTable(StrEnum):
    """Which routes of a speaker (RFC 4271, section 3.2), in the words of Cilium's API."""

    LOC_RIB = "loc-rib"
    ADJ_RIB_IN = "adj-rib-in"
    ADJ_RIB_OUT = "adj-rib-out"


class ListedRoute(msgspec.Struct, frozen=True):
    """A route as a speaker has it; in adj-rib-out as it is sent, with what policies add."""

    prefix: IPNetwork
    nlri: bytes
    """As on the wire (RFC 4271, section 4.3)."""
    attributes: tuple[bytes, ...]
    """Each as on the wire, with its flags and type."""
    since: datetime | None = None
    """When the speaker took it in, with time zone UTC."""
    best: bool = False
    stale: bool = False


class RouteListing(Protocol):
    """Lists the routes of speakers."""

    async def listed_routes(
        self, instance: str, table: RouteTable, family: AfiSafi, peer: IPAddress | None = None
    ) -> list[ListedRoute]:
        """The routes of a table; of an adj-rib those of a peer. Raises HiveError when it does not answer."""
        ...
