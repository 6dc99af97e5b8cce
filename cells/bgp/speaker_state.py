"""Rows shared by the BGP controller, speakers and the API: desired configuration, and observed sessions.

Why:    the controller does not depend on speakers, and speakers do not depend on Kubernetes. An instance is
        one speaker, with an ASN, a router ID and a RIB.
Source: RFC 4271; 4760 (families), 1997 and 8092 (communities), 4724 and 8538 (graceful restart), 2385
        (MD5), 5082 (TTL); Cilium 1.17, BGP control plane: names of route policies and of states.
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
    """An address family by the names of Cilium's resources: ``ipv4`` and ``unicast``."""

    afi: str
    safi: str

    def __str__(self) -> str:
        return f"{self.afi}-{self.safi}"


IPV4_UNICAST: Final = AfiSafi("ipv4", "unicast")
IPV6_UNICAST: Final = AfiSafi("ipv6", "unicast")

NOT_LISTENING: Final = -1
"""Listening port of a speaker that only dials."""
ALLOW_LOCAL: Final = "allow-local"
"""Name of the import policy of every instance: it accepts only local routes, none of peers."""


# What is wanted.


class BGPInstance(msgspec.Struct, frozen=True):
    """A speaker. A change of any field but the name restarts it, which ends its sessions."""

    name: str
    local_asn: int
    router_id: IPv4Address
    listen_port: int = NOT_LISTENING


class SpeakerName(NamedTuple):
    """The name of a gobgpd: of an instance, or of an isolated peer of that instance."""

    instance: str
    peer: str = ""
    """Address of the isolated peer; empty for the gobgpd of the instance."""

    def __str__(self) -> str:
        return f"{self.instance}, peer {self.peer}" if self.peer else self.instance

    @property
    def fields(self) -> dict[str, str]:
        """Fields of log lines."""
        return {"instance": self.instance} | ({"peer": self.peer} if self.peer else {})


class PeerTimers(msgspec.Struct, frozen=True):
    """Timers of a session in seconds."""

    connect_retry: int = 120
    hold: int = 90
    keepalive: int = 30


class PeerRestart(msgspec.Struct, frozen=True):
    """Graceful restart as the restarting speaker, with Notifications (RFC 8538), for all families."""

    enabled: bool = False
    restart_time: int = 120
    """Seconds for which a peer retains routes without a session."""


class BGPPeer(msgspec.Struct, frozen=True):
    """A peer that an instance dials. A changed name, address or ASN is another session."""

    instance: str
    name: str
    address: IPAddress
    """Unique within the instance."""
    asn: int
    """0: any ASN."""
    local_asn: int
    """ASN of the instance."""
    local_address: IPAddress | None = None
    """None: chosen by the kernel."""
    local_port: int = 0
    """0: chosen by the kernel."""
    remote_port: int = 179
    password: Secret | None = None
    """Password of TCP MD5 (RFC 2385)."""
    timers: PeerTimers = PeerTimers()
    multihop_ttl: int = 1
    """TTL of eBGP multihop; ignored for iBGP, and if 1."""
    graceful_restart: PeerRestart = PeerRestart()
    families: tuple[AfiSafi, ...] = (IPV6_UNICAST, IPV4_UNICAST)

    @property
    def external(self) -> bool:
        """Whether the peer has another ASN (eBGP)."""
        return self.asn != self.local_asn

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address


class PolicyDirection(StrEnum):
    """The direction of a route policy."""

    IMPORT = "import"
    EXPORT = "export"


class PrefixMatch(NamedTuple):
    """Matches prefixes within a network, with a range of prefix lengths."""

    cidr: IPNetwork
    min_length: int
    max_length: int

    def __contains__(self, prefix: object) -> bool:
        """Return whether a network matches."""
        return (
            isinstance(prefix, type(self.cidr))
            and self.min_length <= prefix.prefixlen <= self.max_length
            and prefix.subnet_of(self.cidr)  # type: ignore[arg-type]  # both are of the same version
        )


class PolicyStatement(msgspec.Struct, frozen=True):
    """Accepts routes that match all conditions, and adds attributes. An empty condition matches all."""

    neighbors: tuple[IPAddress, ...] = ()
    """Addresses without zones: see without_zone()."""
    prefixes: tuple[PrefixMatch, ...] = ()
    """Sorted."""
    local_routes: bool = False
    """Match only routes that the speaker originates."""
    communities: tuple[int, ...] = ()
    """Communities of 32 bits to add (RFC 1997)."""
    large_communities: tuple[tuple[int, int, int], ...] = ()
    """Large communities to add (RFC 8092)."""
    local_preference: int | None = None
    """LOCAL_PREF for iBGP peers; None: not set."""


def without_zone(address: IPAddress) -> IPAddress:
    """Return the address that policies match: ``fe80::1`` of ``fe80::1%eth0``."""
    return IPv6Address(int(address)) if getattr(address, "scope_id", None) else address


class RoutePolicy(msgspec.Struct, frozen=True):
    """A policy of an instance. The first matching statement accepts a route.

    Routes that no policy accepts are rejected, in both directions.
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
    """A route in an instance's RIB, with ORIGIN IGP and the local address of each session as next hop."""

    instance: str
    prefix: IPNetwork

    @property
    def key(self) -> tuple[str, IPNetwork]:
        """Instance and prefix."""
        return self.instance, self.prefix


def instance_table() -> Table[str, BGPInstance]:
    """Create a table of instances by name."""
    return Table("bgp-instances", key=lambda row: row.name)


def peer_table() -> Table[tuple[str, IPAddress], BGPPeer]:
    """Create a table of peers by instance and address."""
    return Table("bgp-peers", key=lambda row: row.key)


def policy_table() -> Table[tuple[str, str], RoutePolicy]:
    """Create a table of policies by instance and name."""
    return Table("bgp-policies", key=lambda row: row.key)


def path_table() -> Table[tuple[str, IPNetwork], AnnouncedPath]:
    """Create a table of paths by instance and prefix."""
    return Table("bgp-paths", key=lambda row: row.key)


class WantedSpeakers(NamedTuple):
    """Tables of the desired state of all speakers, consistent with each other if read without an await.

    Each is initialized once every source is; before that, nothing is withdrawn from a speaker.
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
    """The state of a session (RFC 4271, section 8.2.2), by the names of Cilium's API."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    CONNECT = "connect"
    ACTIVE = "active"
    OPEN_SENT = "open_sent"
    OPEN_CONFIRM = "open_confirm"
    ESTABLISHED = "established"


class FamilyCounts(msgspec.Struct, frozen=True):
    """Route counts of a family of a session."""

    family: AfiSafi
    received: int = 0
    accepted: int = 0
    advertised: int = 0


class ObservedPeer(msgspec.Struct, frozen=True):
    """A session as gobgpd reports it: a row of the table ``bgp-observed-peers``."""

    instance: str
    address: IPAddress
    asn: int
    local_asn: int
    remote_port: int
    state: PeerState
    established_at: datetime | None = None
    """Time in UTC; None if the session is not established."""
    hold_time: int = 0
    """Negotiated hold time in seconds; 0 before the first session."""
    keepalive: int = 0
    """Negotiated keepalive interval in seconds; 0 before the first session."""
    families: tuple[FamilyCounts, ...] = ()
    capabilities: tuple[str, ...] = ()
    """Names of capabilities that the peer announced."""
    router_id: str = ""
    """Router ID of the peer; empty before the first session."""
    sessions: int = 0
    """Number of sessions established since the speaker started."""
    error: str = ""
    """Why the session ended last; empty if unknown."""
    isolated_at: datetime | None = None
    """Time in UTC when the peer was isolated in its own gobgpd; None if it is not."""
    crashes: int = 0
    """Recent crashes of its own gobgpd."""

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address

    @property
    def established(self) -> bool:
        """Whether the state is established."""
        return self.state is PeerState.ESTABLISHED


def observed_peers() -> Table[tuple[str, IPAddress], ObservedPeer]:
    """Create the table of observed sessions by instance and address; speakers write it."""
    return Table("bgp-observed-peers", key=lambda row: row.key)


class IsolatedPeer(msgspec.Struct, frozen=True):
    """A peer with its own gobgpd until its configuration changes: a row of ``bgp-isolated-peers``."""

    instance: str
    address: IPAddress
    configuration: str
    """Hash of the configuration, without the password."""
    since: datetime
    crashes: int = 0
    """Crashes of its own gobgpd; reset after two hours without a crash."""
    last: datetime | None = None
    """Time of the last crash."""
    counted: datetime | None = None
    """Crash.after of the last counted crash, which the next agent does not count again."""

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address


def isolated_peers() -> Table[tuple[str, IPAddress], IsolatedPeer]:
    """Create the table of isolated peers by instance and address."""
    return Table("bgp-isolated-peers", key=lambda row: row.key)


class HeldPeer(msgspec.Struct, frozen=True):
    """A peer that is not dialled for some time after crashes: a row of the table ``bgp-held-peers``."""

    instance: str
    address: IPAddress
    crashes: int
    """Crashes of gobgpd that are attributed to the peer."""
    until: datetime
    isolated: bool = False
    """Whether the peer has its own gobgpd."""

    @property
    def key(self) -> tuple[str, IPAddress]:
        """Instance and address."""
        return self.instance, self.address

    @property
    def error(self) -> str:
        """Why the peer has no session."""
        times = "crashed" if self.crashes == 1 else f"crashed {self.crashes} times"
        until = f"held down until {self.until:%H:%M:%S} UTC"
        if self.isolated:
            return f"{until}: its own gobgpd {times} by messages of this peer"
        return f"{until}: gobgpd {times}, probably by a message of this peer, and no further one may run"


def held_peers() -> Table[tuple[str, IPAddress], HeldPeer]:
    """Create the table of held peers by instance and address."""
    return Table("bgp-held-peers", key=lambda row: row.key)


class BGPFault(msgspec.Struct, frozen=True):
    """A part of a resource that cannot be applied: a row of the table ``bgp-faults``."""

    instance: str
    """Empty if it affects all instances."""
    subject: str
    """The object or part: ``CiliumBGPPeerConfig/rack0``, ``peer tor-1``."""
    error: str
    """The value, what was expected, and the effect."""

    @property
    def key(self) -> tuple[str, str, str]:
        """All fields, as a subject may have several faults."""
        return self.instance, self.subject, self.error


def bgp_faults() -> Table[tuple[str, str, str], BGPFault]:
    """Create the table of faults."""
    return Table("bgp-faults", key=lambda row: row.key)


# What is listed for those who look.


class RouteTable(StrEnum):
    """The RIBs of a speaker (RFC 4271, section 3.2), by the names of Cilium's API."""

    LOC_RIB = "loc-rib"
    ADJ_RIB_IN = "adj-rib-in"
    ADJ_RIB_OUT = "adj-rib-out"


class ListedRoute(msgspec.Struct, frozen=True):
    """A route in a RIB of a speaker; in Adj-RIB-Out with the attributes that policies add."""

    prefix: IPNetwork
    nlri: bytes
    """In wire format (RFC 4271, section 4.3)."""
    attributes: tuple[bytes, ...]
    """Each in wire format, with flags and type."""
    since: datetime | None = None
    """Time in UTC when the speaker received the route."""
    best: bool = False
    stale: bool = False


class RouteListing(Protocol):
    """Lists the routes of speakers."""

    async def listed_routes(
        self, instance: str, table: RouteTable, family: AfiSafi, peer: IPAddress | None = None
    ) -> list[ListedRoute]:
        """List the routes of a RIB; of an Adj-RIB, those of a peer. Raises HiveError."""
        ...
