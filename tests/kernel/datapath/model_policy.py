"""The plain model's policy: the most specific entry decides."""

from collections.abc import Mapping
from typing import Final

from cells.maps.records.endpoints import PolicyKey
from tests.kernel.datapath.model_packet import Direction, Flow

NO_MATCH, DENIED = 133, 181

Rules = Mapping[PolicyKey, bool]
"""Entries, each with whether it denies."""

_CLASSES: Final = ("peer and port", "port", "peer and protocol", "protocol", "peer", "all")
"""Kinds of entries by precedence. The width of a port range does not matter here."""


def decide(rules: Rules, flow: Flow, direction: Direction, peer: int) -> int | None:
    """Return the drop reason, or None if policy allows the packet.

    Of the entries for this peer the most specific counts, and so for any peer; the one of higher class
    decides.
    """
    egress = direction is Direction.EGRESS
    found = [closest(rules, identity, flow, egress) for identity in (peer, 0)]
    candidates = [key for key in found if key is not None]
    if not candidates:
        return NO_MATCH
    return DENIED if rules[min(candidates, key=lambda key: _CLASSES.index(class_of(key)))] else None


def closest(rules: Rules, identity: int, flow: Flow, egress: bool) -> PolicyKey | None:
    """Return the entry of exactly this identity that covers the packet with the narrowest port range."""
    covering = [
        key for key in rules if (key.identity, key.egress) == (identity, egress) and covers(key, flow)
    ]
    return max(covering, key=lambda key: (key.protocol != 0, key.port_bits), default=None)


def covers(key: PolicyKey, flow: Flow) -> bool:
    """Return whether the entry covers the packet's protocol and port."""
    differing = 16 - key.port_bits
    return key.protocol in {0, flow.protocol} and key.port >> differing == (
        flow.policy_port >> differing if key.port_bits else 0
    )


def class_of(key: PolicyKey) -> str:
    """Return the class of the entry."""
    what = "port" if key.port_bits else "protocol" if key.protocol else ""
    if not key.identity:
        return what or "all"
    return f"peer and {what}" if what else "peer"
