"""What an endpoint is: the request that makes one, its row, its states and the words of its status log."""

import time
from collections import deque
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

from cells.cluster.identity.numbers import INIT_LABELS
from lifecycle.http import Refusal

# The life of an endpoint: its states, the allowed transitions, and the log of what happened to it.
#
# Source: Cilium 1.17, endpoint states and the EndpointHealth model.


class State(StrEnum):
    """Where an endpoint is in its life; the value is what the API shows."""

    NEW = ""
    WAITING_FOR_IDENTITY = "waiting-for-identity"
    NOT_READY = "not-ready"
    """Only ever displayed: ready, but the last thing that happened went wrong."""
    WAITING_TO_REGENERATE = "waiting-to-regenerate"
    REGENERATING = "regenerating"
    RESTORING = "restoring"
    READY = "ready"
    DISCONNECTING = "disconnecting"
    DISCONNECTED = "disconnected"
    INVALID = "invalid"


class Level(IntEnum):
    """How much of an endpoint a regeneration rebuilds."""

    POLICY = 1
    """What the node's policy decides."""
    DATAPATH = 2
    """Everything: policy, rows, program and state file."""

    @property
    def text(self) -> str:
        """As logs name it."""
        return "no-rebuild" if self is Level.POLICY else "rewrite+load"


class TransitionOutcome(StrEnum):
    """Answer to a request for a transition."""

    ACCEPTED = "accepted"
    IGNORED = "ignored"
    """Refused without a word: what is asked for is under way already."""
    SKIPPED = "skipped"
    """Refused and logged: the request makes no sense in this state."""


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

_QUIET: Final = frozenset(
    {
        (State.WAITING_TO_REGENERATE, State.WAITING_FOR_IDENTITY),
        (State.WAITING_TO_REGENERATE, State.WAITING_TO_REGENERATE),
    }
)
_BUILDER_QUIET: Final = frozenset(
    {(State.WAITING_TO_REGENERATE, State.READY), (State.RESTORING, State.READY)}
)


def transition(old: State, new: State, *, builder: bool = False) -> TransitionOutcome:
    """Whether an endpoint may go from ``old`` to ``new``; ``builder`` asks on behalf of a regeneration."""
    if new in (_BUILDER_ALLOWED if builder else _ALLOWED).get(old, frozenset()):
        return TransitionOutcome.ACCEPTED
    if (old, new) in (_BUILDER_QUIET if builder else _QUIET):
        return TransitionOutcome.IGNORED
    return TransitionOutcome.SKIPPED


class Code(StrEnum):
    """How an entry of the status log went; the value is what the API shows."""

    OK = "OK"
    WARNING = "Warning"
    FAILURE = "Failure"


class Subject(StrEnum):
    """What an entry of the status log is about. Each subject's newest entry counts for the display."""

    BPF = "BPF"
    POLICY = "Policy"
    OTHER = "Other"


class StatusEntry(msgspec.Struct, frozen=True, gc=False):
    """One line of an endpoint's status log."""

    code: Code
    subject: Subject
    message: str
    state: State
    time: float
    """Unix seconds."""


STATUS_LOG_SIZE: Final = 256


class StatusLog:
    """What happened to one endpoint, the newest 256 entries."""

    __slots__ = ("_entries", "_newest")

    def __init__(self) -> None:
        self._entries: deque[StatusEntry] = deque(maxlen=STATUS_LOG_SIZE)
        self._newest: dict[Subject, Code] = {}

    def add(
        self, code: Code, subject: Subject, message: str, state: State, when: float | None = None
    ) -> None:
        """Append an entry of ``when`` (Unix seconds; now by default); beyond 256 the oldest one goes."""
        self._entries.append(StatusEntry(code, subject, message, state, when or time.time()))
        self._newest[subject] = code

    @property
    def current(self) -> Code:
        """The worst of the subjects' newest entries: what decides between ``ready`` and ``not-ready``."""
        codes = self._newest.values()
        if Code.FAILURE in codes:
            return Code.FAILURE
        return Code.WARNING if Code.WARNING in codes else Code.OK

    @property
    def newest(self) -> StatusEntry | None:
        """The last entry, None in an empty log."""
        return self._entries[-1] if self._entries else None

    def entries(self) -> list[StatusEntry]:
        """All entries, newest first, as ``GET /endpoint/{id}/log`` gives them."""
        return list(reversed(self._entries))


def displayed(state: State, log: StatusLog) -> State:
    """The state as shown outside: ``not-ready`` for a ready endpoint with a current status other than OK."""
    return State.NOT_READY if state is State.READY and log.current is not Code.OK else state


class EndpointHealthStatus(msgspec.Struct, frozen=True):
    """EndpointHealth of the API."""

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
    """Health of an endpoint from its displayed state."""
    return _HEALTH.get(shown, _UNHEALTHY)


# The messages of an endpoint's status log, in Cilium's words.
#
# Source: Cilium 1.17, the reasons of state transitions.

CREATED: Final = "Endpoint creation"
RESTORED: Final = "Restoring endpoint from previous cilium instance"
STARTING: Final = "Starting endpoint regeneration"
COMPLETED: Final = "Completed endpoint regeneration with no pending regeneration requests"
RELABELLED: Final = "Triggering identity resolution due to updated identity labels"
IDENTIFIED: Final = "Set identity for this endpoint"
NOT_IDENTIFIED: Final = "No identity for the new labels: the endpoint keeps those it has"
DELETED: Final = "the endpoint was deleted before it was made"
SUPERSEDED: Final = "another endpoint of the same pod is created in its place"


def triggered(reason: str) -> str:
    """A build is due."""
    return f"Triggering endpoint regeneration due to {reason}"


def regenerated(reason: str) -> str:
    """A build went well."""
    return f"Successfully regenerated endpoint program (Reason: {reason})"


_INITIAL: Final = "Initial build on endpoint creation"
FIRST_BUILT: Final = regenerated(_INITIAL)
FIRST_BUILD: Final = (
    (IDENTIFIED, State.READY),
    (triggered(_INITIAL), State.WAITING_TO_REGENERATE),
    (STARTING, State.REGENERATING),
)
"""The steps up to the first build, with the state each leads to."""


# What an endpoint is: the request that makes one, the row that describes it, the error that refuses it.

ZERO_MAC = bytes(6)
IPAddress = IPv4Address | IPv6Address


def addresses_of(ipv6: IPv6Address | None, ipv4: IPv4Address | None) -> tuple[IPAddress, ...]:
    """Those there are, IPv6 first."""
    if ipv6 is None:
        return () if ipv4 is None else (ipv4,)
    return (ipv6,) if ipv4 is None else (ipv6, ipv4)


class EndpointError(Refusal):
    """An endpoint request that cannot be served.

    ``status`` is the HTTP status of ``PUT|GET|DELETE /endpoint`` (400, 404, 500); ``text`` the documented
    sentence, as the REST API and the CNI plugin show it.
    """


class DatapathConfiguration(msgspec.Struct, frozen=True):
    """``datapath-configuration`` of the API: what the requester wants done (or left) for this endpoint."""

    external_ipam: bool = False
    """The address is another IPAM's: it is neither claimed at restore nor released at delete."""
    require_arp_passthrough: bool = False
    """The stack, or a bridge, answers the pod's ARP and neighbour discovery."""
    require_egress_prog: bool = False
    """A program looks at what the host's end of the link sends, too."""
    require_routing: bool | None = None
    """False leaves the pod's packets to the stack, or a bridge, also those to pods of this node."""
    install_endpoint_route: bool = False
    """The node has a route to the pod's addresses alone, over its link."""
    disable_sip_verification: bool = False

    @property
    def on_anothers_link(self) -> bool:
        """Whether another plugin made the link, as in a chain: address and routes are that one's, too."""
        return self.external_ipam and self.require_arp_passthrough

    def with_endpoint_routes(self, *, wanted: bool) -> "DatapathConfiguration":
        """The same with a route of its own to the pod, over the stack, or without one."""
        if self.on_anothers_link or wanted == self.install_endpoint_route:
            return self
        return msgspec.structs.replace(
            self,
            install_endpoint_route=wanted,
            require_egress_prog=wanted,
            require_routing=False if wanted else None,
        )

    @property
    def egress_prog(self) -> bool:
        """Whether what comes to the pod by its link is looked at there: nothing did so before."""
        return self.require_egress_prog or self.require_routing is False


NO_DATAPATH_CONFIGURATION = DatapathConfiguration()


class EndpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``PUT /endpoint`` and our own plugin's ADD both give.

    The link exists already (``ifname``/``ifindex`` are its host side) and so does the address.
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
    """Of the IPv4 address."""
    expiration_uuid: str = ""
    """Expiration timer of the address, stopped once the endpoint stands; empty when none was armed."""
    ipv6: IPv6Address | None = None
    ipv6_pool: str = ""
    ipv6_expiration_uuid: str = ""
    network: str = ""
    """Name of the CNI network the attachment belongs to; empty when the requester does not name one."""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    netns_cookie: int = 0
    labels: tuple[str, ...] = ()
    """``source:key[=value]``, as in the API."""
    reserved: int = 0
    """The reserved identity of one of the node's own endpoints, which has its labels; 0 for a pod."""
    disable_legacy_identifiers: bool = False
    datapath: DatapathConfiguration = NO_DATAPATH_CONFIGURATION

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        """The pod's addresses, IPv6 first."""
        return addresses_of(self.ipv6, self.ipv4)

    @property
    def attachment_id(self) -> str:
        """``<container id>:<container ifname>``, as of the endpoint to be; empty without a container."""
        if not self.container_id:
            return ""
        return f"{self.container_id}:{self.container_ifname}" if self.container_ifname else self.container_id


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ``endpoints`` table: an attachment of a container to this node's network."""

    id: int
    container_id: str
    container_ifname: str
    ifname: str
    ifindex: int
    pod_mac: bytes
    host_mac: bytes
    ipv4: IPv4Address | None
    pool: str
    """Of the IPv4 address."""
    identity: int
    labels: tuple[str, ...]
    """Security-relevant labels, sorted: those the identity stands for."""
    pod_name: str
    pod_namespace: str
    pod_uid: str
    netns_cookie: int
    state: State
    created: float
    """Unix seconds."""
    info_labels: tuple[str, ...] = ()
    custom_labels: tuple[str, ...] = ()
    """Those of the labels that a user put on the endpoint; the others are the pod's."""
    container_name: str = ""
    disable_legacy_identifiers: bool = False
    datapath: DatapathConfiguration = NO_DATAPATH_CONFIGURATION
    ipv6: IPv6Address | None = None
    ipv6_pool: str = ""
    network: str = ""
    """Name of the CNI network the attachment belongs to; empty when it is not known."""

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        """The pod's addresses, IPv6 first."""
        return addresses_of(self.ipv6, self.ipv4)

    @property
    def pod_labels(self) -> tuple[str, ...]:
        """The security-relevant labels that no user put on the endpoint."""
        if not self.custom_labels:
            return self.labels
        return tuple(label for label in self.labels if label not in self.custom_labels)

    def pool_of(self, address: IPAddress) -> str:
        """The pool one of its addresses is from."""
        return self.ipv6_pool if address.version == 6 else self.pool

    @property
    def attachment_id(self) -> str:
        """``<container id>:<container ifname>``; the second part is left out when there is none."""
        return f"{self.container_id}:{self.container_ifname}" if self.container_ifname else self.container_id

    @property
    def is_reserved(self) -> bool:
        """Whether it is the node's own (host, health, ingress), by its labels; reserved:init is any pod's."""
        return any(label.startswith("reserved:") and label not in INIT_LABELS for label in self.labels)

    @property
    def pod(self) -> str:
        """``<namespace>/<pod name>``; ``/`` for an endpoint that is not a pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def cep_name(self) -> str:
        """Name of the endpoint's CiliumEndpoint: the pod's, with the interface where a pod has several."""
        if self.disable_legacy_identifiers and self.pod_name:
            return f"{self.pod_name}-{self.container_ifname}"
        return self.pod_name

    @property
    def title(self) -> str:
        """How people name it: the pod, else the attachment, else the container."""
        return self.pod if self.pod_name else self.attachment_id or self.container_name
