"""The plain model's conntrack: for each pod, the flows it started and accepted."""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from tests.kernel.datapath.model_packet import FIN, ICMP, ICMPV6, RST, SYN, TCP, Address, Direction, Flow

OUT, IN, RELATED = 0, 1, 2
TCP_LIFETIME, SYN_LIFETIME, OTHER_LIFETIME, CLOSED_LIFETIME = 8000, 60, 60, 10
_REPORTED: Final = SYN | FIN | RST


class Status(Enum):
    """The conntrack state of a packet for the pod."""

    NEW = auto()
    ESTABLISHED = auto()
    REPLY = auto()
    RELATED = auto()


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a flow from ``starter`` to ``peer``; ``flags`` name the owner, and mark ICMP errors."""

    starter: Address
    peer: Address
    dport: int
    sport: int
    protocol: int
    flags: int

    @classmethod
    def started_by(cls, flow: Flow, direction: Direction) -> "Key":
        """Return the key of the flow that this packet would start."""
        flags = (IN if direction is Direction.INGRESS else OUT) | RELATED * flow.related
        return cls(flow.source, flow.destination, flow.dport, flow.sport, flow.protocol, flags)

    @classmethod
    def answered_by(cls, flow: Flow, direction: Direction) -> "Key":
        """Return the key of the flow that this packet would answer, with both ends swapped."""
        flags = (OUT if direction is Direction.INGRESS else IN) | RELATED * flow.related
        return cls(flow.destination, flow.source, flow.sport, flow.dport, flow.protocol, flags)

    def errors(self) -> "Key":
        """Return the key for ICMP errors between the two."""
        icmp = ICMP if self.starter.version == 4 else ICMPV6
        return replace(self, dport=0, sport=0, protocol=icmp, flags=self.flags | RELATED)


@dataclass(slots=True)
class Entry:
    """A conntrack entry. ``rx`` is what its pod receives, ``tx`` what it sends."""

    source_identity: int
    until: int
    """The last second in which the entry is valid."""
    seen_non_syn: bool = False
    closed: frozenset[Direction] = frozenset()
    seen: tuple[int, int] = (0, 0)
    """TCP flags seen: received, sent."""

    def saw(self, tcp_flags: int, direction: Direction) -> None:
        """Record a packet's flags in that direction."""
        received, sent = self.seen
        if direction is Direction.INGRESS:
            received |= tcp_flags & _REPORTED
        else:
            sent |= tcp_flags & _REPORTED
        self.seen = (received, sent)

    @property
    def over(self) -> bool:
        """Return whether both directions are closed."""
        return len(self.closed) == 2


class Conntrack:
    """All conntrack entries of the node."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.found: Entry | None = None
        """The entry of the last packet looked up."""
        self._until_before = 0

    def look_up(self, flow: Flow, direction: Direction, now: int) -> Status:
        """Return the state of a packet and update its entry.

        It matches at most one entry, except when a flow ended and the other side starts one between the same
        ports: then the direction that it looks like decides. An ICMP packet is a reply only if its type is
        one.
        """
        ways: tuple[bool, ...] = (flow.answer_likely, not flow.answer_likely)
        if flow.protocol in {ICMP, ICMPV6} and not flow.answer_likely:
            ways = (False,)
        for answer in ways:
            key = Key.answered_by(flow, direction) if answer else Key.started_by(flow, direction)
            if self._belongs(key, flow, direction, now):
                if not answer:
                    return Status.ESTABLISHED
                return Status.RELATED if flow.related else Status.REPLY
        return Status.NEW

    def _belongs(self, key: Key, flow: Flow, direction: Direction, now: int) -> bool:
        entry = self.entries.get(key)
        if entry is None or entry.until < now:
            return False
        self.found, self._until_before = entry, entry.until
        if flow.protocol != TCP:
            until = now + OTHER_LIFETIME
            entry.until = max(entry.until, until) if flow.related else until
            return True
        return self._note_tcp(entry, flow.tcp_flags, direction, now)

    def alive(self, key: Key, now: int) -> Entry | None:
        """Return the entry if it has not expired, without a change."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.until >= now else None

    def not_prolonged(self) -> None:
        """Undo the new lifetime of the entry, as the last packet looked up is dropped."""
        if self.found is not None:
            self.found.until = self._until_before

    def _note_tcp(self, entry: Entry, flags: int, direction: Direction, now: int) -> bool:
        ends = bool(flags & (RST | FIN))
        if flags & SYN and not ends and entry.closed:  # after the end, a beginning: not of this flow
            entry.closed, entry.seen, entry.seen_non_syn = frozenset(), (0, 0), False
            self._refresh_tcp(entry, flags, direction, now)
            return False
        if not entry.over:
            self._refresh_tcp(entry, flags, direction, now)
        if ends:
            entry.closed |= set(Direction) if flags & RST else {direction}
            if entry.over:
                entry.until = now + CLOSED_LIFETIME
                entry.saw(flags, direction)
        return True

    def _refresh_tcp(self, entry: Entry, flags: int, direction: Direction, now: int) -> None:
        entry.seen_non_syn |= not flags & SYN
        entry.until = now + (TCP_LIFETIME if entry.seen_non_syn else SYN_LIFETIME)
        entry.saw(flags, direction)

    def create(self, flow: Flow, direction: Direction, source_identity: int, now: int) -> None:
        """Create an entry for an allowed flow, and one for ICMP errors about it."""
        tcp = flow.protocol == TCP
        key = Key.started_by(flow, direction)
        entry = Entry(source_identity, now + (SYN_LIFETIME if tcp else OTHER_LIFETIME))
        entry.saw(SYN if tcp else 0, direction)
        self.entries[key] = entry
        until = now + (TCP_LIFETIME if tcp else OTHER_LIFETIME)
        known = self.entries.get(key.errors())
        if known and known.source_identity == source_identity:
            known.until = max(known.until, until)
        else:
            self.entries[key.errors()] = replace(entry, until=until)
