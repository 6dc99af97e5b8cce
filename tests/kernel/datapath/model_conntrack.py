"""The plain model's conntrack: each pod remembers its flows, what it started and what it accepted."""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from tests.kernel.datapath.model_packet import FIN, ICMP, ICMPV6, RST, SYN, TCP, Address, Direction, Flow

OUT, IN, RELATED = 0, 1, 2
TCP_LIFETIME, SYN_LIFETIME, OTHER_LIFETIME, CLOSED_LIFETIME = 8000, 60, 60, 10
_REPORTED: Final = SYN | FIN | RST


class Status(Enum):
    """What a packet is to the pod."""

    NEW = auto()
    ESTABLISHED = auto()
    REPLY = auto()
    RELATED = auto()


@dataclass(frozen=True, slots=True)
class Key:
    """Of a flow from ``starter`` to ``peer``; ``flags`` say to which of them it belongs, and errors."""

    starter: Address
    peer: Address
    dport: int
    sport: int
    protocol: int
    flags: int

    @classmethod
    def started_by(cls, flow: Flow, direction: Direction) -> "Key":
        """The flow that this packet would have started."""
        flags = (IN if direction is Direction.INGRESS else OUT) | RELATED * flow.related
        return cls(flow.source, flow.destination, flow.dport, flow.sport, flow.protocol, flags)

    @classmethod
    def answered_by(cls, flow: Flow, direction: Direction) -> "Key":
        """The flow that this packet would answer: all the other way round."""
        flags = (OUT if direction is Direction.INGRESS else IN) | RELATED * flow.related
        return cls(flow.destination, flow.source, flow.sport, flow.dport, flow.protocol, flags)

    def errors(self) -> "Key":
        """Where ICMP errors between the two are looked for."""
        icmp = ICMP if self.starter.version == 4 else ICMPV6
        return replace(self, dport=0, sport=0, protocol=icmp, flags=self.flags | RELATED)


@dataclass(slots=True)
class Entry:
    """A flow. The receiving direction is ``rx``, the other ``tx``, seen from the pod it belongs to."""

    source_identity: int
    until: int
    """The second at the end of which it is forgotten."""
    seen_non_syn: bool = False
    closed: frozenset[Direction] = frozenset()
    seen: tuple[int, int] = (0, 0)
    """TCP flags seen: received, sent."""

    def saw(self, tcp_flags: int, direction: Direction) -> None:
        """Note flags of a packet in that direction."""
        received, sent = self.seen
        if direction is Direction.INGRESS:
            received |= tcp_flags & _REPORTED
        else:
            sent |= tcp_flags & _REPORTED
        self.seen = (received, sent)

    @property
    def over(self) -> bool:
        """Whether both directions have ended."""
        return len(self.closed) == 2


class Conntrack:
    """All entries of the node."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.found: Entry | None = None
        """What the last packet looked up belongs to."""
        self._until_before = 0

    def look_up(self, flow: Flow, direction: Direction, now: int) -> Status:
        """What the packet is, noted in the entry it belongs to.

        It belongs to one at most, except when a flow ended and its other side began anew between the same
        ports: then to the one that it looks like. Of ICMP nothing is an answer that does not look like one.
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
        """The entry, if its time is not over. It is left as it is."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.until >= now else None

    def not_prolonged(self) -> None:
        """The last packet looked up is dropped, and its flow ends no later for it."""
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
        """Remember a flow that policy has let through, and expect errors about it."""
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
