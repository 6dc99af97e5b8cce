"""The kernel's network state as JSON: links, addresses, routes, rules, neighbours, filters.

Source: rtnetlink(7); the output of ``ip`` and ``tc``, for programs.
"""

import socket
from collections.abc import Iterable, Mapping
from typing import Any

_EGRESS, _INGRESS = 0xFFFF_FFF3, 0xFFFF_FFF2
"""Where filters of a clsact qdisc are (linux/pkt_sched.h)."""


def network_state() -> dict[str, list[object]]:
    """Return the objects of the current network namespace, by kind. Raises OSError."""
    from pyroute2 import IPRoute, NetlinkError

    families = socket.AF_INET, socket.AF_INET6
    try:
        with IPRoute() as ip:
            qdiscs = list(ip.get_qdiscs())
            guarded = [each["index"] for each in qdiscs if each.get_attr("TCA_KIND") == "clsact"]
            return {
                "links": _plain(ip.get_links()),
                "addresses": _plain(ip.get_addr()),
                "routes": [row for family in families for row in _plain(ip.get_routes(family=family))],
                "rules": [row for family in families for row in _plain(ip.get_rules(family=family))],
                "neighbours": _plain(ip.get_neighbours()),
                "qdiscs": _plain(qdiscs),
                "filters": [
                    row
                    for index in guarded
                    for parent in (_INGRESS, _EGRESS)
                    for row in _plain(ip.get_filters(index=index, parent=parent))
                ],
            }
    except NetlinkError as error:
        raise OSError(error.code, str(error)) from error


def _plain(messages: Iterable[Any]) -> list[object]:
    return [_value(message) for message in messages]


def _value(value: Any) -> object:
    """Return a message, or a value in it, as JSON: attributes by name, bytes in hex."""
    match value:
        case Mapping():
            fields = {key: _value(each) for key, each in value.items() if key not in _NOISE}
            attributes = {slot[0]: _value(slot[1]) for slot in value.get("attrs") or ()}
            return fields | attributes
        case bytes():
            return value.hex()
        case list() | tuple():
            return [_value(each) for each in value]
        case int() | float() | str() | None:
            return value
    return str(value)


_NOISE = {"attrs", "header", "event", "__align"}
