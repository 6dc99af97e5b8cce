"""The life of an endpoint: its states, the allowed transitions, and the log of what happened to it.

For:   Endpoints.   Needs: nothing.   Gives: State, Level, StatusLog, judge(), health_of().
Source: Cilium 1.17, endpoint states and the EndpointHealth model.
"""

import time
from collections import deque
from enum import IntEnum, StrEnum
from typing import Final

import msgspec


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


class Verdict(StrEnum):
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


def judge(old: State, new: State, *, builder: bool = False) -> Verdict:
    """Whether an endpoint may go from ``old`` to ``new``; ``builder`` asks on behalf of a regeneration."""
    if new in (_BUILDER_ALLOWED if builder else _ALLOWED).get(old, frozenset()):
        return Verdict.ACCEPTED
    if (old, new) in (_BUILDER_QUIET if builder else _QUIET):
        return Verdict.IGNORED
    return Verdict.SKIPPED


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
    """The state as shown outside: ``not-ready`` for a ready endpoint whose current status is not OK."""
    return State.NOT_READY if state is State.READY and log.current is not Code.OK else state


class EndpointHealth(msgspec.Struct, frozen=True):
    """EndpointHealth of the API."""

    overall: str
    bpf: str
    policy: str
    connected: bool


_HEALTH: Final[dict[State, EndpointHealth]] = {
    State.REGENERATING: EndpointHealth("Pending", "Pending", "Pending", connected=True),
    State.WAITING_TO_REGENERATE: EndpointHealth("Pending", "Pending", "Pending", connected=True),
    State.DISCONNECTING: EndpointHealth("Pending", "Pending", "Pending", connected=True),
    State.WAITING_FOR_IDENTITY: EndpointHealth("Disabled", "Disabled", "Bootstrap", connected=True),
    State.NOT_READY: EndpointHealth("Warning", "Warning", "Warning", connected=True),
    State.READY: EndpointHealth("OK", "OK", "OK", connected=True),
}
_UNHEALTHY: Final = EndpointHealth("Disabled", "Disabled", "Disabled", connected=False)


def health_of(shown: State) -> EndpointHealth:
    """Health of an endpoint from its displayed state."""
    return _HEALTH.get(shown, _UNHEALTHY)
