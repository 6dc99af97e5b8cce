"""Delivers packets with a mark to the node itself, whatever their destination: a rule, and a route in its
table.

For:    proxies, to which the stack hands what pods send to others. Needs: the wire format.
Gives:  Marked, take_marked(), leave_marked().
Why:    pyroute2 would take 0.1 s and 13 MB of every start.
Formats: linux/fib_rules.h (struct fib_rule_hdr, FRA_*), linux/rtnetlink.h; the tests compare them with
        pyroute2's encoder byte by byte.
"""

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from cells.node.netlink import messages as m
from cells.node.netlink.connection import Connection, open_socket
from cells.node.netlink.wire import NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, Request, u32

RTM_NEWRULE, RTM_DELRULE = 32, 33
FRA_PRIORITY, FRA_FWMARK, FRA_TABLE, FRA_FWMASK = 6, 10, 15, 16
FR_ACT_TO_TBL: Final = 1
RTN_LOCAL: Final = 2
RTPROT_STATIC: Final = 4
RT_SCOPE_HOST: Final = 254
RT_TABLE_COMPAT: Final = 252
"""What stands for the number of a table that needs more than a byte; RTA_TABLE has it."""
_ABSENT: Final = (errno.ENOENT, errno.ESRCH, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENETUNREACH)
_RULE = struct.Struct("=8BI")


class Marked(msgspec.Struct, frozen=True):
    """Which packets, and by which table."""

    mark: int
    mask: int
    """Of the bits that the mark consists of."""
    table: int
    priority: int
    """Of the rule; the lower, the earlier it is asked."""


def rule(kind: int, flags: int, marked: Marked, family: int, tolerate: tuple[int, ...]) -> Request:
    """The rule, to be made or removed."""
    body = (
        _RULE.pack(family, 0, 0, 0, RT_TABLE_COMPAT, 0, 0, FR_ACT_TO_TBL, 0)
        + u32(FRA_PRIORITY, marked.priority)
        + u32(FRA_FWMARK, marked.mark)
        + u32(FRA_TABLE, marked.table)
        + u32(FRA_FWMASK, marked.mask)
    )
    return Request(f"the rule for table {marked.table}", kind, flags, body, tolerate)


def route(kind: int, flags: int, marked: Marked, family: int, tolerate: tuple[int, ...]) -> Request:
    """The route for everything in the table, to be made or removed."""
    head = m.ROUTE.pack(family, 0, 0, 0, RT_TABLE_COMPAT, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0)
    body = head + u32(m.RTA_TABLE, marked.table) + u32(m.RTA_OIF, socket.if_nametoindex("lo"))
    return Request(f"the route of table {marked.table}", kind, flags, body, tolerate)


def take_marked(marked: Marked, families: Collection[int]) -> None:
    """Have the stack take these packets for the node's own. Raises NetlinkError, OSError.

    What is there already is fine.
    """
    replace, new = NLM_F_CREATE | NLM_F_REPLACE, NLM_F_CREATE | NLM_F_EXCL
    with _connected() as connection:
        for family in families:
            connection.run(
                route(m.RTM_NEWROUTE, replace, marked, family, ()),
                rule(RTM_NEWRULE, new, marked, family, (errno.EEXIST,)),
            )


def leave_marked(marked: Marked, families: Collection[int]) -> None:
    """Take that back; what is gone is fine, and so is a kernel without the family. NetlinkError, OSError."""
    with _connected() as connection:
        for family in families:
            connection.run(
                rule(RTM_DELRULE, 0, marked, family, _ABSENT),
                route(m.RTM_DELROUTE, 0, marked, family, _ABSENT),
            )


@contextmanager
def _connected() -> Iterator[Connection]:
    fd = open_socket()
    try:
        yield Connection(fd)
    finally:
        os.close(fd)
