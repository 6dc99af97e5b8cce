"""Wire types of the API outside Cilium's document: tables, settings, event loop, events and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import field

from cells.api.models import Model
from cells.config.drift import Change

# Rows of tables as Cilium's clients read them: Go's field names, and no field left out.
#
# Source: Cilium 1.17, ``cilium-dbg statedb``; recorded rows are in the tests' ``dbg/statedb_*``.


class _Row(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", gc=False):
    """Base of all rows."""


class HealthID(_Row, frozen=True):
    """The module, and the part of it."""

    module: Sequence[str]
    component: Sequence[str]


class HealthStatusRow(_Row, frozen=True):
    """``health``: the last report of a part of the agent; a time in the year 1 means never."""

    id: HealthID = field(name="ID")
    level: str
    message: str
    error: str
    last_ok: str = field(name="LastOK")
    updated: str
    stopped: str
    final: str
    count: int


class DeviceAddrRow(_Row, frozen=True):
    """An address of a device, with its rtnetlink scope."""

    addr: str
    secondary: bool
    scope: int


class DeviceRow(_Row, frozen=True):
    """``devices``: a link of the node. ``flags`` are Go's net.Flags, ``raw_flags`` those of linux/if.h."""

    index: int
    mtu: int = field(name="MTU")
    name: str
    hardware_addr: str
    flags: int
    addrs: Sequence[DeviceAddrRow]
    raw_flags: int
    type: str
    master_index: int
    selected: bool
    """Whether the datapath's programs are attached to it as to a native device."""
    not_selected_reason: str


class NodeRouteRow(_Row, frozen=True):
    """``routes``: a route of the node, in any table."""

    table: int
    link_index: int
    scope: int
    dst: str
    src: str
    gw: str


class NodeAddressRow(_Row, frozen=True):
    """``node-addresses``: an address of the node, and its use."""

    addr: str
    node_port: bool
    primary: bool
    device_name: str


class OriginRow(_Row, frozen=True):
    """The service of an announced address."""

    name: str
    namespace: str


class L2AnnounceRow(_Row, frozen=True):
    """``l2-announce``: an address that this node announces on a device."""

    ip: str = field(name="IP")
    network_interface: str
    origins: Sequence[OriginRow]


class ReconcilerStatus(_Row, frozen=True):
    """Whether a row is realized in the kernel; ``kind`` is pending, done or error."""

    kind: str
    updated_at: str
    error: str
    id: int = field(name="ID")


class SysctlRow(_Row, frozen=True):
    """``sysctl``: a kernel setting that the agent maintains."""

    name: Sequence[str]
    val: str
    ignore_err: bool
    warn: str
    status: ReconcilerStatus


class CiliumRow(msgspec.Struct, frozen=True):
    """A row, and the revision of its last change."""

    rev: int
    obj: object
    """A row of the requested table, in one of the forms above."""


class Failure(Model, frozen=True):
    """Why the request failed."""

    err: str


# --- tables ----------------------------------------------------------------------------------------


class Query(msgspec.Struct, frozen=True):
    """The rows of one key of a table, or all rows from that key on."""

    table: str
    index: str
    key: str = ""
    """In base64."""
    lowerbound: bool = False


# --- the hive --------------------------------------------------------------------------------------


class LoopLoad(Model, frozen=True):
    """Durations for which the event loop was busy without a pause, in seconds, since the agent started.

    ``counts[i]`` durations were at most ``bounds[i]``, those in the last count exceeded every bound; a
    percentile that is null lies among the latter.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    longest: float
    p99: float | None
    p99_9: float | None = field(name="p99.9")


class Setting(Model, frozen=True):
    """A setting in force, its value as text and the source of the value."""

    name: str
    value: str
    origin: str


class Settings(Model, frozen=True):
    """Every setting, the sources that are read, and what a restart would change."""

    places: str
    settings: Sequence[Setting]
    changes: Sequence[Change]


# --- events ----------------------------------------------------------------------------------------


class RingState(Model, frozen=True, omit_defaults=False):
    """The events that the agent stores."""

    begins: int | None
    """Time of the oldest event, in nanoseconds since 1970; null without events."""
    held: int
    capacity: int


class NamesThen(Model, frozen=True):
    """Names of both ends of an event at its time."""

    endpoints: Mapping[int, str] = {}
    """``namespace/name`` of pods, by endpoint of this node."""
    pods: Mapping[str, str] = {}
    """``namespace/name`` of pods on any node, by address."""
    services: Mapping[str, str] = {}
    """``namespace/name`` of services, by address that is not a pod's."""
    identities: Mapping[int, Sequence[str]] = {}
    """Labels, by identity."""


class EventLine(Model, frozen=True):
    """A line of /hive/events: ``history``, then stored events, ``live``, then new events."""

    history: RingState | None = None
    live: bool = False
    """All stored events have been sent."""
    time: int = 0
    """Time of the event, in nanoseconds since 1970."""
    data: bytes = b""
    """The record as on the monitor socket, in base64."""
    lost: int = 0
    """Number of events that were lost here."""
    cpu: int | None = None
    """The CPU of the event's buffer, or of the buffer that was full."""
    names: NamesThen | None = None


# --- policies --------------------------------------------------------------------------------------


class DecidingRule(Model, frozen=True, omit_defaults=False):
    """A rule in words, and its labels."""

    rule: str
    labels: Sequence[str]


class VerdictRules(Model, frozen=True, omit_defaults=False):
    """The rules that decide on a packet of an endpoint; empty if no rule applies to it.

    ``verdict`` is ``unknown`` if this agent has not computed a policy for the endpoint.
    """

    verdict: str
    rules: Sequence[DecidingRule]


class MatrixEnd(Model, frozen=True, omit_defaults=False):
    """Pods with one identity, to which the same policies apply, or a reserved identity."""

    ask: str
    """Its name in requests to /hive/policy/explain."""
    identity: int
    namespace: str
    labels: Sequence[str]
    pods: Sequence[str]
    """Pods on this node, by namespace and name."""
    here: bool
    """Whether this node enforces its policies."""
    networks: Sequence[str] = ()
    """Networks of rules that contain its addresses, if networks select pods."""


class MatrixCell(Model, frozen=True, omit_defaults=False):
    """The verdict from a source to a destination, on all ports; both are indexes in the lists of ends."""

    source: int = field(name="from")
    destination: int = field(name="to")
    verdict: str
    headline: str


class PolicyMatrix(Model, frozen=True, omit_defaults=False):
    """Which sources may reach which destinations; pairs on which this node does not decide have no cell."""

    sources: Sequence[MatrixEnd]
    destinations: Sequence[MatrixEnd]
    more_sources: int
    """Number of sources above the requested maximum, which are omitted."""
    more_destinations: int
    namespaces: Sequence[str]
    """Namespaces of all listed pods."""
    cells: Sequence[MatrixCell]


class Reached(Model, frozen=True, omit_defaults=False):
    """The verdict from a pod to another, and the directions that deny it."""

    source: str = field(name="from")
    destination: str = field(name="to")
    port: str
    """Empty if several ports have different verdicts."""
    verdict: str
    headline: str
    denied: str
