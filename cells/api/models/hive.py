"""The wire types of what the API has beside Cilium's document: tables, settings and the event loop."""

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
    """What all have in common."""


class HealthID(_Row, frozen=True):
    """Which part of which module."""

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
    """``node-addresses``: an address of the node, and what it is used for."""

    addr: str
    node_port: bool
    primary: bool
    device_name: str


class OriginRow(_Row, frozen=True):
    """A service."""

    name: str
    namespace: str


class L2AnnounceRow(_Row, frozen=True):
    """``l2-announce``: an address this node answers for on a device."""

    ip: str = field(name="IP")
    network_interface: str
    origins: Sequence[OriginRow]


class ReconcilerStatus(_Row, frozen=True):
    """How far the kernel has been made equal to a row; ``kind`` is pending, done or error."""

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
    """A row, and the revision in which it last changed."""

    rev: int
    obj: object
    """A row of the table asked for, one of the above."""


class Failure(Model, frozen=True):
    """Why there is no other answer."""

    err: str


# --- tables ----------------------------------------------------------------------------------------


class Query(msgspec.Struct, frozen=True):
    """What is asked of a table: the rows of one key, or all from it on."""

    table: str
    index: str
    key: str = ""
    """In base64."""
    lowerbound: bool = False


# --- the hive --------------------------------------------------------------------------------------


class LoopLoad(Model, frozen=True):
    """How long the event loop was busy at a stretch, in seconds, since the agent started.

    ``counts[i]`` stretches took at most ``bounds[i]``, the last of them longer than every bound; a
    share that is null is among these.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    longest: float
    p99: float | None
    p99_9: float | None = field(name="p99.9")


class Setting(Model, frozen=True):
    """A setting in force, its value as text, and where that is from."""

    name: str
    value: str
    origin: str


class Settings(Model, frozen=True):
    """Every setting, where they are read from, and what a restart would change."""

    places: str
    settings: Sequence[Setting]
    changes: Sequence[Change]


# --- events ----------------------------------------------------------------------------------------


class RingState(Model, frozen=True, omit_defaults=False):
    """How far back the agent's events go."""

    begins: int | None
    """When the oldest came, in nanoseconds since 1970; null where there is none."""
    held: int
    capacity: int


class NamesThen(Model, frozen=True):
    """Names of both ends of an event at its time."""

    endpoints: Mapping[int, str] = {}
    """``namespace/name`` of the pods of endpoints of this node."""
    pods: Mapping[str, str] = {}
    """``namespace/name`` of the pods at addresses, on any node."""
    services: Mapping[str, str] = {}
    """Likewise of services, at addresses of no pod."""
    identities: Mapping[int, Sequence[str]] = {}
    """Labels."""


class EventLine(Model, frozen=True):
    """A line of /hive/events: ``history``, the events that were there, ``live``, and the events that come."""

    history: RingState | None = None
    live: bool = False
    """All that was there has been sent."""
    time: int = 0
    """When the event came, in nanoseconds since 1970."""
    data: bytes = b""
    """The record, in base64, as it is on the monitor socket."""
    lost: int = 0
    """Events that are missing here."""
    cpu: int | None = None
    """Of the buffer that it came by, or that was full."""
    names: NamesThen | None = None


# --- policies --------------------------------------------------------------------------------------


class DecidingRule(Model, frozen=True, omit_defaults=False):
    """A rule in words, and its labels."""

    rule: str
    labels: Sequence[str]


class VerdictRules(Model, frozen=True, omit_defaults=False):
    """The rules that decide on a packet of an endpoint; none where no rule speaks of it.

    ``verdict`` is ``unknown`` of an endpoint that has no policy by rules here.
    """

    verdict: str
    rules: Sequence[DecidingRule]


class MatrixEnd(Model, frozen=True, omit_defaults=False):
    """Pods that fare alike as they have one identity, or what a reserved identity stands for."""

    ask: str
    """What /hive/policy/explain takes for it."""
    identity: int
    namespace: str
    labels: Sequence[str]
    pods: Sequence[str]
    """Of this node, by namespace and name."""
    here: bool
    """Whether this node decides about it."""
    networks: Sequence[str] = ()
    """Networks of rules around its addresses, where these select pods."""


class MatrixCell(Model, frozen=True, omit_defaults=False):
    """How a source reaches a destination, on all ports; both by their places in the lists of ends."""

    source: int = field(name="from")
    destination: int = field(name="to")
    verdict: str
    headline: str


class PolicyMatrix(Model, frozen=True, omit_defaults=False):
    """Which sources may reach which destinations, as far as this node decides; other pairs have no cell."""

    sources: Sequence[MatrixEnd]
    destinations: Sequence[MatrixEnd]
    more_sources: int
    """Left off, as only so many were asked for."""
    more_destinations: int
    namespaces: Sequence[str]
    """Of all pods that are known."""
    cells: Sequence[MatrixCell]


class Reached(Model, frozen=True, omit_defaults=False):
    """How a pod reaches another, and which directions deny it."""

    source: str = field(name="from")
    destination: str = field(name="to")
    port: str
    """Empty where several fare differently."""
    verdict: str
    headline: str
    denied: str
