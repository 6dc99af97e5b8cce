"""Settings of Hubble's core: what it keeps, passes over and hides.

Source: Cilium 1.17, options ``enable-hubble`` and ``hubble-*``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lifecycle import Settings, refuse

MONITOR_EVENTS: Final = {
    "drop": 1,
    "debug": 2,
    "capture": 3,
    "trace": 4,
    "policy-verdict": 5,
    "recorder": 6,
    "trace-sock": 7,
    "l7": 129,
    "agent": 130,
}
"""Numbers of kinds of events, by the names that ``hubble-monitor-events`` has for them."""


def check_capacity(capacity: int) -> None:
    """Raise ValueError for a number of events that a ring cannot have: 2^n - 1, n from 1 to 16."""
    if capacity > 0xFFFF:
        raise ValueError(f"invalid capacity: too large: {capacity}")
    if capacity < 1 or capacity & (capacity + 1):
        raise ValueError(f"invalid capacity: must be one less than an integer power of two: {capacity}")


class HubbleSettings(Settings, frozen=True):
    """Flows of this node: packets, requests and lookups, with the names of both sides."""

    enable_hubble: bool = False
    """Keep the node's flows, and serve them to hubble and its relay."""

    hubble_event_buffer_capacity: int = 4095
    """Events that the ring holds: one less than a power of two, 65535 at most."""

    hubble_event_queue_size: int = 0
    """Events that wait to be taken in before further ones are lost; 0: 1024 for each processor, at most
    16384."""

    hubble_monitor_events: tuple[str, ...] = ()
    """Kinds of events that the ring takes: drop, debug, capture, trace, policy-verdict, trace-sock, l7,
    agent; none named: all."""

    hubble_skip_unknown_cgroup_ids: bool = True
    """Pass over socket traces of processes that are in no pod."""

    hubble_redact_enabled: bool = False
    """Hide parts of HTTP and Kafka requests, as the options hubble-redact-* say."""

    hubble_redact_http_urlquery: bool = False
    """Hide the query and the fragment of URLs."""

    hubble_redact_http_userinfo: bool = True
    """Hide passwords in URLs, also where hubble-redact-enabled is false."""

    hubble_redact_http_headers_allow: tuple[str, ...] = ()
    """Headers shown with their values; the values of all others are hidden."""

    hubble_redact_http_headers_deny: tuple[str, ...] = ()
    """Headers shown without their values; with neither list the values of all are hidden."""

    hubble_redact_kafka_apikey: bool = False
    """Hide the API key of Kafka requests."""

    def validate(self) -> None:
        """Refuse what cannot work; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        try:
            check_capacity(self.hubble_event_buffer_capacity)
        except ValueError as error:
            yield f"hubble-event-buffer-capacity: {error}"
        if self.hubble_event_queue_size < 0:
            yield f"hubble-event-queue-size={self.hubble_event_queue_size}: expected 0 or more"
        for name in self.hubble_monitor_events:
            if name not in MONITOR_EVENTS:
                known = ", ".join(MONITOR_EVENTS)
                yield f"hubble-monitor-events: unknown monitor event type: {name}, expected some of {known}"
        if self.hubble_redact_http_headers_allow and self.hubble_redact_http_headers_deny:
            yield "hubble-redact-http-headers-allow and -deny: only one of them may be set"
