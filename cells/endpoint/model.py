"""The endpoint model: request, table row, states with their transitions, and the status log.

Pure values; no I/O. Source: Cilium 1.17, pkg/endpoint and the API's Endpoint model.
"""

import time
from collections import deque
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

from cells.cluster.identity.numbers import INIT_LABELS
from lifecycle.http import Refusal

# States of an endpoint, their allowed transitions, and the status log.
#
# Source: Cilium 1.17, endpoint states and the EndpointHealth model.


class State(StrEnum):
    """State of an endpoint; the value is what the API shows."""

    NEW = ""
    WAITING_FOR_IDENTITY = "waiting-for-identity"
    NOT_READY = "not-ready"
    """Shown only, never stored: a ready endpoint with a status other than OK."""
    WAITING_TO_REGENERATE = "waiting-to-regenerate"
    REGENERATING = "regenerating"
    RESTORING = "restoring"
    READY = "ready"
    DISCONNECTING = "disconnecting"
    DISCONNECTED = "disconnected"
    INVALID = "invalid"


class RegenerationLevel(IntEnum):
    """How much of an endpoint a regeneration writes."""

    POLICY = 1
    """The policy map and the configuration entry."""
    DATAPATH = 2
    """All state: policy, map entries, program and state file."""

    @property
    def text(self) -> str:
        """Name in logs."""
        return "no-rebuild" if self is RegenerationLevel.POLICY else "rewrite+load"


class TransitionOutcome(StrEnum):
    """The outcome of a requested state transition."""

    ACCEPTED = "accepted"
    IGNORED = "ignored"
    """Rejected without a log entry: the requested work is already in progress."""
    SKIPPED = "skipped"
    """Rejected and logged: the transition is invalid."""


_ALLOWED: Final[dict[State, frozenset[State]]] = {
    State.NEW: frozenset({State.WAITING_FOR_IDENTITY, State.RESTORING}),
    State.WAITING_FOR_IDENTITY: frozenset({State.READY, State.DISCONNECTING, State.INVALID}),
    State.READY: frozenset(
        {State.WAITING_FOR_IDENTITY, State.DISCONNECTING, State.WAITING_TO_REGENERATE, State.RESTORING}
    ),
    State.DISCONNECTING: frozenset({State.DISCONNECTED}),
    State.WAITING_TO_REGENERATE: frozenset({State.DISCONNECTING, State.RESTORING}),
    State.REGENERATING: frozenset(
        {State.WAITING_FOR_IDENTITY, State.DISCONNECTING, State.WAITING_TO_REGENERATE, State.RESTORING}
    ),
    State.RESTORING: frozenset({State.DISCONNECTING, State.RESTORING}),
    State.DISCONNECTED: frozenset(),
    State.INVALID: frozenset(),
}

_BUILDER_ALLOWED: Final[dict[State, frozenset[State]]] = {
    State.WAITING_TO_REGENERATE: frozenset({State.REGENERATING}),
    State.RESTORING: frozenset({State.REGENERATING}),
    State.REGENERATING: frozenset({State.READY}),
}

_IGNORED: Final = frozenset(
    {
        (State.WAITING_TO_REGENERATE, State.WAITING_FOR_IDENTITY),
        (State.WAITING_TO_REGENERATE, State.WAITING_TO_REGENERATE),
    }
)
_BUILDER_IGNORED: Final = frozenset(
    {(State.WAITING_TO_REGENERATE, State.READY), (State.RESTORING, State.READY)}
)


def transition(old: State, new: State, *, builder: bool = False) -> TransitionOutcome:
    """Return whether an endpoint may change from ``old`` to ``new``.

    ``builder``: the transition is requested by a regeneration.
    """
    if new in (_BUILDER_ALLOWED if builder else _ALLOWED).get(old, frozenset()):
        return TransitionOutcome.ACCEPTED
    if (old, new) in (_BUILDER_IGNORED if builder else _IGNORED):
        return TransitionOutcome.IGNORED
    return TransitionOutcome.SKIPPED


class Code(StrEnum):
    """Result of an entry of the status log; the value is what the API shows."""

    OK = "OK"
    WARNING = "Warning"
    FAILURE = "Failure"


class Subject(StrEnum):
    """Subject of a status log entry; the newest entry of each subject decides the shown state."""

    BPF = "BPF"
    POLICY = "Policy"
    OTHER = "Other"


class StatusEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of an endpoint's status log."""

    code: Code
    subject: Subject
    message: str
    state: State
    time: float
    """Unix seconds."""


STATUS_LOG_SIZE: Final = 256


class StatusLog:
    """The status log of one endpoint: its newest 256 entries."""

    __slots__ = ("_entries", "_newest")

    def __init__(self) -> None:
        self._entries: deque[StatusEntry] = deque(maxlen=STATUS_LOG_SIZE)
        self._newest: dict[Subject, Code] = {}

    def add(
        self, code: Code, subject: Subject, message: str, state: State, when: float | None = None
    ) -> None:
        """Append an entry at time ``when`` (Unix seconds; default: now); evict the oldest of 256."""
        self._entries.append(StatusEntry(code, subject, message, state, when or time.time()))
        self._newest[subject] = code

    @property
    def current(self) -> Code:
        """The worst code of the subjects' newest entries."""
        codes = self._newest.values()
        if Code.FAILURE in codes:
            return Code.FAILURE
        return Code.WARNING if Code.WARNING in codes else Code.OK

    @property
    def newest(self) -> StatusEntry | None:
        """The last entry; None if the log is empty."""
        return self._entries[-1] if self._entries else None

    def entries(self) -> list[StatusEntry]:
        """Return all entries, newest first, as in ``GET /endpoint/{id}/log``."""
        return list(reversed(self._entries))


def displayed(state: State, log: StatusLog) -> State:
    """Return the state that the API shows: ``not-ready`` if ready with a status other than OK."""
    return State.NOT_READY if state is State.READY and log.current is not Code.OK else state


class EndpointHealthStatus(msgspec.Struct, frozen=True):
    """The API's EndpointHealth."""

    overall: str
    bpf: str
    policy: str
    connected: bool


_HEALTH: Final[dict[State, EndpointHealthStatus]] = {
    State.REGENERATING: EndpointHealthStatus("Pending", "Pending", "Pending", connected=True),
    State.WAITING_TO_REGENERATE: EndpointHealthStatus("Pending", "Pending", "Pending", connected=True),
    State.DISCONNECTING: EndpointHealthStatus("Pending", "Pending", "Pending", connected=True),
    State.WAITING_FOR_IDENTITY: EndpointHealthStatus("Disabled", "Disabled", "Bootstrap", connected=True),
    State.NOT_READY: EndpointHealthStatus("Warning", "Warning", "Warning", connected=True),
    State.READY: EndpointHealthStatus("OK", "OK", "OK", connected=True),
}
_UNHEALTHY: Final = EndpointHealthStatus("Disabled", "Disabled", "Disabled", connected=False)


def health_of(shown: State) -> EndpointHealthStatus:
    """Return the health of an endpoint from its shown state."""
    return _HEALTH.get(shown, _UNHEALTHY)


# Messages of the status log.
#
# Source: Cilium 1.17, the reasons of state transitions.

CREATED: Final = "Endpoint creation"
RESTORED: Final = "Restoring endpoint from previous cilium instance"
STARTING: Final = "Starting endpoint regeneration"
COMPLETED: Final = "Completed endpoint regeneration with no pending regeneration requests"
RELABELLED: Final = "Triggering identity resolution due to updated identity labels"
IDENTIFIED: Final = "Set identity for this endpoint"
NOT_IDENTIFIED: Final = "No identity for the new labels: the endpoint keeps its current ones"
DELETED: Final = "the endpoint was deleted during its creation"
SUPERSEDED: Final = "superseded by a newer endpoint of the same pod"


def triggered(reason: str) -> str:
    """Return the message of a requested regeneration."""
    return f"Triggering endpoint regeneration due to {reason}"


def regenerated(reason: str) -> str:
    """Return the message of a successful regeneration."""
    return f"Successfully regenerated endpoint program (Reason: {reason})"


_INITIAL: Final = "Initial build on endpoint creation"
FIRST_BUILT: Final = regenerated(_INITIAL)
FIRST_BUILD: Final = (
    (IDENTIFIED, State.READY),
    (triggered(_INITIAL), State.WAITING_TO_REGENERATE),
    (STARTING, State.REGENERATING),
)
"""Messages and states of the first build."""


# The request for an endpoint, its row, and the error for invalid requests.

ZERO_MAC = bytes(6)
IPAddress = IPv4Address | IPv6Address


def addresses_of(ipv6: IPv6Address | None, ipv4: IPv4Address | None) -> tuple[IPAddress, ...]:
    """Return the addresses that are not None, IPv6 first."""
    if ipv6 is None:
        return () if ipv4 is None else (ipv4,)
    return (ipv6,) if ipv4 is None else (ipv6, ipv4)


class EndpointError(Refusal):
    """An error of an endpoint request.

    ``status`` is the HTTP status of ``PUT|GET|DELETE /endpoint`` (400, 404, 500); ``text`` is the message
    that the REST API and the CNI plugin return.
    """


class DatapathConfiguration(msgspec.Struct, frozen=True):
    """The API's EndpointDatapathConfiguration: options of this endpoint's datapath."""

    external_ipam: bool = False
    """Another IPAM allocated the address: restore does not claim it, and delete does not release it."""
    require_arp_passthrough: bool = False
    """The network stack or a bridge answers the pod's ARP requests and neighbour solicitations."""
    require_egress_prog: bool = False
    """A program also processes packets that the host side of the link transmits to the pod."""
    require_routing: bool | None = None
    """False: the network stack or a bridge forwards the pod's packets, also to pods of this node."""
    install_endpoint_route: bool = False
    """The node has a route to the pod's addresses over its link."""
    disable_sip_verification: bool = False

    @property
    def is_chained(self) -> bool:
        """Whether another plugin of a CNI chain created the link, with address and routes."""
        return self.external_ipam and self.require_arp_passthrough

    def with_endpoint_routes(self, *, wanted: bool) -> "DatapathConfiguration":
        """Return a copy with or without endpoint routes; unchanged in a CNI chain."""
        if self.is_chained or wanted == self.install_endpoint_route:
            return self
        return msgspec.structs.replace(
            self,
            install_endpoint_route=wanted,
            require_egress_prog=wanted,
            require_routing=False if wanted else None,
        )

    @property
    def egress_prog(self) -> bool:
        """Whether a program on the link enforces ingress policy, as no earlier program has."""
        return self.require_egress_prog or self.require_routing is False


NO_DATAPATH_CONFIGURATION = DatapathConfiguration()


class EndpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a new endpoint, from ``PUT /endpoint`` or our plugin's ADD.

    The link (``ifname`` and ``ifindex`` are its host side) and the address exist already.
    """

    container_id: str = ""
    container_ifname: str = ""
    container_name: str = ""
    ifname: str
    ifindex: int
    pod_mac: bytes
    host_mac: bytes
    ipv4: IPv4Address | None
    pool: str = ""
    """Pool of the IPv4 address."""
    expiration_uuid: str = ""
    """Expiration timer of the address, stopped once the endpoint is ready; empty without a timer."""
    ipv6: IPv6Address | None = None
    ipv6_pool: str = ""
    ipv6_expiration_uuid: str = ""
    network: str = ""
    """Name of the attachment's CNI network; empty if unknown."""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    netns_cookie: int = 0
    labels: tuple[str, ...] = ()
    """``source:key[=value]``, as in the API."""
    reserved: int = 0
    """The reserved identity of one of the node's own endpoints, which gets its labels; 0 for a pod."""
    disable_legacy_identifiers: bool = False
    datapath: DatapathConfiguration = NO_DATAPATH_CONFIGURATION

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        """The pod's addresses, IPv6 first."""
        return addresses_of(self.ipv6, self.ipv4)

    @property
    def attachment_id(self) -> str:
        """``<container id>:<container ifname>``; empty without a container."""
        if not self.container_id:
            return ""
        return f"{self.container_id}:{self.container_ifname}" if self.container_ifname else self.container_id


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the ``endpoints`` table: an attachment of a container to this node's network."""

    id: int
    container_id: str
    container_ifname: str
    ifname: str
    ifindex: int
    pod_mac: bytes
    host_mac: bytes
    ipv4: IPv4Address | None
    pool: str
    """Pool of the IPv4 address."""
    identity: int
    labels: tuple[str, ...]
    """Security-relevant labels, sorted: the labels of the identity."""
    pod_name: str
    pod_namespace: str
    pod_uid: str
    netns_cookie: int
    state: State
    created: float
    """Unix seconds."""
    info_labels: tuple[str, ...] = ()
    custom_labels: tuple[str, ...] = ()
    """Security-relevant labels that a user added; the others are the pod's."""
    container_name: str = ""
    disable_legacy_identifiers: bool = False
    datapath: DatapathConfiguration = NO_DATAPATH_CONFIGURATION
    ipv6: IPv6Address | None = None
    ipv6_pool: str = ""
    network: str = ""
    """Name of the attachment's CNI network; empty if unknown."""

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        """The pod's addresses, IPv6 first."""
        return addresses_of(self.ipv6, self.ipv4)

    @property
    def pod_labels(self) -> tuple[str, ...]:
        """The security-relevant labels without the custom ones."""
        if not self.custom_labels:
            return self.labels
        return tuple(label for label in self.labels if label not in self.custom_labels)

    def pool_of(self, address: IPAddress) -> str:
        """Return the pool of one of the endpoint's addresses."""
        return self.ipv6_pool if address.version == 6 else self.pool

    @property
    def attachment_id(self) -> str:
        """``<container id>:<container ifname>``; only the id without an interface name."""
        return f"{self.container_id}:{self.container_ifname}" if self.container_ifname else self.container_id

    @property
    def is_reserved(self) -> bool:
        """Whether it is one of the node's own endpoints (host, health, ingress); reserved:init is a pod's."""
        return any(label.startswith("reserved:") and label not in INIT_LABELS for label in self.labels)

    @property
    def pod(self) -> str:
        """``<namespace>/<pod name>``; ``/`` for an endpoint that is not a pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def cep_name(self) -> str:
        """Name of the endpoint's CiliumEndpoint: the pod's, plus the interface if the pod has several."""
        if self.disable_legacy_identifiers and self.pod_name:
            return f"{self.pod_name}-{self.container_ifname}"
        return self.pod_name

    @property
    def title(self) -> str:
        """Name in messages: the pod, else the attachment or the container."""
        return self.pod if self.pod_name else self.attachment_id or self.container_name
