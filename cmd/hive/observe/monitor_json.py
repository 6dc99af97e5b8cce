"""Formats an event of the datapath as a line of JSON.

Source: the keys of ``cilium-dbg monitor -j``; ``time``, ``names`` and ``rules`` are ours.
"""

import json
from datetime import datetime
from typing import Any

import msgspec

from cells.observe.events import (
    OBSERVATION_POINTS,
    SOCKET_POINTS,
    SOCKET_PROTOCOLS,
    TRACE_REASONS,
    AgentNotification,
    Drop,
    Event,
    EventNames,
    LookupRecord,
    Lost,
    Packet,
    Raw,
    RequestRecord,
    Trace,
    TraceSock,
    Verdict,
    dissect,
    notification_name,
    reason_name,
)


def json_line(
    event: Event,
    cpu: int | None,
    now: datetime,
    names: EventNames,
    rules: list[dict[str, Any]] | None = None,
) -> str:
    """Return a line without its end; ``cpu`` is None if unknown, ``rules`` None if not requested."""
    record = _record(event)
    record.setdefault("time", now.isoformat(timespec="milliseconds"))  # requests have times of their own
    if rules is not None:
        record["rules"] = rules
    if cpu is not None:
        record = {"cpu": f"CPU {cpu:02}:"} | record
    if (
        not isinstance(event, Lost | Raw | RequestRecord | LookupRecord | TraceSock | AgentNotification)
        and (packet := dissect(event.packet)) is not None
    ):
        record["summary"] = _summary(packet)
        ends = {"src": str(packet.source or ""), "dst": str(packet.destination or "")}
        record["names"] = {end: name for end, ip in ends.items() if ip and (name := names.address(ip))}
    return json.dumps(record)


def _record(event: Event) -> dict[str, Any]:
    match event:
        case AgentNotification() | Lost() | Raw():
            return _other(event)
        case RequestRecord() | LookupRecord():
            return {"type": "l7", **msgspec.to_builtins(event)}
        case TraceSock():
            return {
                "type": "trace-sock",
                "point": SOCKET_POINTS.get(event.point, "unknown"),
                "address": str(event.address),
                "port": event.port,
                "protocol": SOCKET_PROTOCOLS.get(event.protocol, "unknown"),
                "sockCookie": event.cookie,
                "cgroupID": event.cgroup,
            }
        case Drop():
            return {
                "type": "drop",
                "mark": f"{event.hash:#x}",
                "reason": reason_name(event.reason),
                "source": event.source,
                "bytes": event.length,
                "srcLabel": event.source_identity,
                "dstLabel": event.destination_identity,
                "dstID": event.destination,
                "Line": event.line,
                "File": event.file,
                "ExtError": event.ext_error,
                "Ifindex": event.ifindex,
            }
        case Trace():
            return {
                "type": "trace",
                "mark": f"{event.hash:#x}",
                "ifindex": str(event.ifindex),
                "state": TRACE_REASONS.get(event.reason, str(event.reason)),
                "observationPoint": OBSERVATION_POINTS.get(event.point, str(event.point)),
                "source": event.source,
                "bytes": event.length,
                "srcLabel": event.source_identity,
                "dstLabel": event.destination_identity,
                "dstID": event.destination,
            }
        case Verdict():
            return {
                "type": "policy-verdict",
                "mark": f"{event.hash:#x}",
                "source": event.source,
                "bytes": event.length,
                "remote-id": event.remote_identity,
                "direction": "egress" if event.egress else "ingress",
                "action": "deny" if event.verdict < 0 else "redirect" if event.verdict else "allow",
                "proto": event.protocol,
                "port": event.port,
            }


def _other(event: AgentNotification | Lost | Raw) -> dict[str, Any]:
    if isinstance(event, AgentNotification):
        return {"type": "agent", "subtype": notification_name(event), "message": _message(event.text)}
    if isinstance(event, Lost):
        return {"type": "lost", "count": event.count}
    return {"type": "unknown", "data": event.data.hex()}


def _message(text: str) -> Any:
    """Return the content of a notification; its text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _summary(packet: Packet) -> dict[str, Any]:
    layers: dict[str, Any] = {"l2": {"src": packet.source_mac, "dst": packet.destination_mac}}
    if packet.source is not None:
        layers["l3"] = {"src": str(packet.source), "dst": str(packet.destination)}
    if packet.ports is not None:
        layers["l4"] = {"src": str(packet.ports[0]), "dst": str(packet.ports[1])}
    return layers | {"protocol": packet.protocol, "detail": packet.detail}
