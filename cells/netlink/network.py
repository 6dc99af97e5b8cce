"""Policy routing by packet mark: fwmark rules, and the routes of the tables they select.

The DNS proxy (Cilium's table 2004) uses a rule and a local default route; IPsec (table 200) keeps several
rules and routes.
"""

import errno
import socket
import struct
from collections.abc import Callable, Collection
from ipaddress import ip_network
from typing import Final

import msgspec

from cells.netlink import messages as m
from cells.netlink.connection import NetlinkError, connected
from cells.netlink.messages import IPNetwork
from cells.netlink.wire import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attribute,
    select_attributes,
    u32,
)

__all__ = [
    "FwmarkRule",
    "FwmarkRuleRow",
    "TableRoute",
    "add_local_delivery",
    "clear_table",
    "delete_fwmark_rules",
    "read_table",
    "remove_local_delivery",
    "remove_rows",
    "set_rows",
]


# Delivery of marked packets to local sockets: a fwmark rule, and a local default route in its table.
#
# Formats: linux/fib_rules.h (struct fib_rule_hdr, FRA_*), linux/rtnetlink.h; the tests compare them with
# pyroute2's encoder byte by byte. Importing pyroute2 would add 0.1 s and 13 MB to every start.

RTM_NEWRULE, RTM_DELRULE, RTM_GETRULE = 32, 33, 34
FRA_PRIORITY, FRA_FWMARK, FRA_TABLE, FRA_FWMASK, FRA_PROTOCOL = 6, 10, 15, 16, 21
FR_ACT_TO_TBL: Final = 1
RTN_LOCAL: Final = 2
RTPROT_STATIC: Final = 4
RTM_F_CLONED: Final = 0x200
RT_SCOPE_UNIVERSE: Final = 0
RT_SCOPE_HOST: Final = 254
RT_TABLE_COMPAT: Final = 252
"""The rtm_table value for table numbers above 255; RTA_TABLE has the number."""
_ABSENT: Final = (errno.ENOENT, errno.ESRCH, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENETUNREACH)
_RULE = struct.Struct("=8BI")


class FwmarkRule(msgspec.Struct, frozen=True):
    """A fwmark rule: packets with this mark use this routing table."""

    mark: int
    mask: int
    """The bits of the packet's mark to compare."""
    table: int
    priority: int
    """Of the rule; lower numbers are evaluated first."""


def rule(kind: int, flags: int, fwmark: FwmarkRule, family: int, tolerate: tuple[int, ...]) -> Request:
    """Encode a request that adds or deletes the rule."""
    body = (
        _RULE.pack(family, 0, 0, 0, RT_TABLE_COMPAT, 0, 0, FR_ACT_TO_TBL, 0)
        + u32(FRA_PRIORITY, fwmark.priority)
        + u32(FRA_FWMARK, fwmark.mark)
        + u32(FRA_TABLE, fwmark.table)
        + u32(FRA_FWMASK, fwmark.mask)
    )
    return Request(f"the rule for table {fwmark.table}", kind, flags, body, tolerate)


def route(kind: int, flags: int, fwmark: FwmarkRule, family: int, tolerate: tuple[int, ...]) -> Request:
    """Encode a request that adds or deletes the local default route of the rule's table."""
    head = m.ROUTE.pack(family, 0, 0, 0, RT_TABLE_COMPAT, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0)
    body = head + u32(m.RTA_TABLE, fwmark.table) + u32(m.RTA_OIF, socket.if_nametoindex("lo"))
    return Request(f"the route of table {fwmark.table}", kind, flags, body, tolerate)


def add_local_delivery(fwmark: FwmarkRule, families: Collection[int]) -> None:
    """Deliver packets with this mark to local sockets, whatever their destination; idempotent.

    Adds the rule and a local default route in its table. Raises NetlinkError, OSError.
    """
    replace, new = NLM_F_CREATE | NLM_F_REPLACE, NLM_F_CREATE | NLM_F_EXCL
    with connected() as connection:
        for family in families:
            connection.run(
                route(m.RTM_NEWROUTE, replace, fwmark, family, ()),
                rule(RTM_NEWRULE, new, fwmark, family, (errno.EEXIST,)),
            )


def remove_local_delivery(fwmark: FwmarkRule, families: Collection[int]) -> None:
    """Remove what add_local_delivery() added; missing entries and families are ignored.

    Raises NetlinkError, OSError.
    """
    with connected() as connection:
        for family in families:
            connection.run(
                rule(RTM_DELRULE, 0, fwmark, family, _ABSENT),
                route(m.RTM_DELROUTE, 0, fwmark, family, _ABSENT),
            )


def delete_fwmark_rules(fwmark: FwmarkRule, families: Collection[int]) -> bool:
    """Delete all rules of this mark, table and priority; return whether any existed.

    Raises NetlinkError, OSError.
    """
    found = False
    with connected() as connection:
        for family in families:
            try:
                while True:  # the kernel allows duplicates
                    connection.run(rule(RTM_DELRULE, 0, fwmark, family, ()))
                    found = True
            except NetlinkError as error:
                if error.errno not in _ABSENT:
                    raise
    return found


def clear_table(table: int, families: Collection[int]) -> int:
    """Delete all routes of a table and return their number. Raises NetlinkError, OSError."""
    count = 0
    with connected(strict=True) as connection:
        for family in families:
            head = m.ROUTE.pack(family, *[0] * 8) + u32(m.RTA_TABLE, table)
            try:
                rows = connection.dump(
                    Request(f"list routes of table {table}", m.RTM_GETROUTE, NLM_F_DUMP, head)
                )
            except NetlinkError as error:
                if error.errno not in _ABSENT:  # returned for a table without routes
                    raise
                continue
            for row in rows:
                what = f"remove a route of table {table}"
                connection.run(Request(what, m.RTM_DELROUTE, 0, row.body, _ABSENT))
            count += len(rows)
    return count


# Several rules and routes of one table, reconciled row by row (IPsec).


class FwmarkRuleRow(msgspec.Struct, frozen=True):
    """A fwmark rule of one address family."""

    rule: FwmarkRule
    family: int


class TableRoute(msgspec.Struct, frozen=True):
    """A route of a policy routing table, over a link, without a gateway."""

    destination: IPNetwork
    ifindex: int
    local: bool = False
    """Whether it is of type local: packets are delivered to the node itself."""
    mtu: int = 0
    """MTU metric; 0 for the link's MTU."""


def read_table(wanted: Collection[FwmarkRule], families: Collection[int]) -> list[FwmarkRuleRow | TableRoute]:
    """Return those of the ``wanted`` rules that exist, and the routes of their tables.

    Only routes with the kernel's protocol number and without a gateway are returned: others are foreign.
    Raises NetlinkError, OSError.
    """
    found: list[FwmarkRuleRow | TableRoute] = []
    tables = {fwmark.table for fwmark in wanted}
    with connected(strict=True) as connection:
        for family in families:
            rules = Request("list rules", RTM_GETRULE, NLM_F_DUMP, _RULE.pack(family, *[0] * 8))
            found += [
                FwmarkRuleRow(one, family)
                for row in connection.dump(rules)
                if (one := _read_rule(row.body)) is not None and one in wanted
            ]
            for table in tables:
                head = m.ROUTE.pack(family, *[0] * 8) + u32(m.RTA_TABLE, table)
                routes = Request(f"list routes of table {table}", m.RTM_GETROUTE, NLM_F_DUMP, head)
                try:
                    rows = connection.dump(routes)
                except NetlinkError as error:
                    if error.errno not in _ABSENT:  # returned for a table without routes
                        raise
                    continue
                found += [route for row in rows if (route := _read_route(row.body)) is not None]
    return found


def set_rows(
    rows: Collection[FwmarkRuleRow | TableRoute], table: int
) -> dict[FwmarkRuleRow | TableRoute, NetlinkError]:
    """Add these rules, and add or replace these routes in the table; return the errors by row."""
    return _each(rows, lambda one: _set_row(one, table))


def remove_rows(
    rows: Collection[FwmarkRuleRow | TableRoute], table: int
) -> dict[FwmarkRuleRow | TableRoute, NetlinkError]:
    """Remove these rules and routes; missing ones are ignored. Return the errors by row."""
    return _each(rows, lambda one: _remove_row(one, table))


def _each(
    rows: Collection[FwmarkRuleRow | TableRoute], request: Callable[[FwmarkRuleRow | TableRoute], Request]
) -> dict[FwmarkRuleRow | TableRoute, NetlinkError]:
    refused = {}
    with connected() as connection:
        for one in rows:
            try:
                connection.run(request(one))
            except NetlinkError as error:
                refused[one] = error
    return refused


def _set_row(one: FwmarkRuleRow | TableRoute, table: int) -> Request:
    if isinstance(one, FwmarkRuleRow):
        made = rule(RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, one.rule, one.family, (errno.EEXIST,))
        protocol = attribute(FRA_PROTOCOL, bytes([m.RTPROT_KERNEL]))
        return made._replace(body=made.body + protocol)
    scope = RT_SCOPE_HOST if one.local else RT_SCOPE_UNIVERSE
    kind = RTN_LOCAL if one.local else m.RTN_UNICAST
    body = _route_head(one, table, m.RTPROT_KERNEL, scope, kind) + u32(m.RTA_OIF, one.ifindex)
    if one.mtu:
        body += attribute(m.RTA_METRICS, u32(m.RTAX_MTU, one.mtu))
    what = f"set route {one.destination} of table {table}"
    return Request(what, m.RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body)


def _remove_row(one: FwmarkRuleRow | TableRoute, table: int) -> Request:
    if isinstance(one, FwmarkRuleRow):
        return rule(RTM_DELRULE, 0, one.rule, one.family, _ABSENT)
    body = _route_head(one, table, 0, m.RT_SCOPE_NOWHERE, 0) + u32(m.RTA_OIF, one.ifindex)
    what = f"remove route {one.destination} of table {table}"
    return Request(what, m.RTM_DELROUTE, 0, body, (*_ABSENT, errno.ENODEV))


def _route_head(one: TableRoute, table: int, protocol: int, scope: int, kind: int) -> bytes:
    network = one.destination
    head = (m.family_of(network), network.prefixlen, 0, 0, RT_TABLE_COMPAT, protocol, scope, kind, 0)
    body = m.ROUTE.pack(*head) + u32(m.RTA_TABLE, table)
    if network.prefixlen:
        body += attribute(m.RTA_DST, network.network_address.packed)
    return body


def _read_rule(body: bytes) -> FwmarkRule | None:
    """Return the fwmark rule of a message; None if the rule has other selectors."""
    _, to_bits, from_bits, *_ = _RULE.unpack_from(body)
    found = select_attributes(body, _RULE.size, frozenset((FRA_PRIORITY, FRA_FWMARK, FRA_TABLE, FRA_FWMASK)))
    if to_bits or from_bits or FRA_FWMARK not in found:
        return None
    order = (FRA_FWMARK, FRA_FWMASK, FRA_TABLE, FRA_PRIORITY)
    return FwmarkRule(*(int.from_bytes(found.get(kind, b""), "little") for kind in order))


def _read_route(body: bytes) -> TableRoute | None:
    family, bits, _, _, _, protocol, _, kind, flags = m.ROUTE.unpack_from(body)
    if protocol != m.RTPROT_KERNEL or kind not in {m.RTN_UNICAST, RTN_LOCAL} or flags & RTM_F_CLONED:
        return None
    kinds = frozenset((m.RTA_DST, m.RTA_OIF, m.RTA_GATEWAY, m.RTA_METRICS))
    found = select_attributes(body, m.ROUTE.size, kinds)
    if m.RTA_OIF not in found or m.RTA_GATEWAY in found:
        return None
    nothing = bytes(4 if family == socket.AF_INET else 16)
    metrics = select_attributes(found.get(m.RTA_METRICS, b""), 0, frozenset((m.RTAX_MTU,)))
    return TableRoute(
        ip_network((found.get(m.RTA_DST, nothing), bits)),
        int.from_bytes(found[m.RTA_OIF], "little"),
        kind == RTN_LOCAL,
        int.from_bytes(metrics.get(m.RTAX_MTU, b""), "little"),
    )
