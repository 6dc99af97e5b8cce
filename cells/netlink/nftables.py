"""nftables over netlink: dump its objects, and replace a table of ours in one transaction.

The Envoy cell keeps the rules of proxied connections in the table "hive-proxy"; kube-proxy detection reads
foreign tables.

Source: kernel include/uapi/linux/netfilter/nf_tables.h, nfnetlink.h (batches); nft(8).
"""

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from cells.netlink.connection import NetlinkError, answers, connected, open_socket
from cells.netlink.wire import NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, Request, attribute, attributes, encode

__all__ = [
    "NOT_SUPPORTED",
    "ORIGINAL",
    "OWN_TABLE",
    "TRANSLATED",
    "NftablesChain",
    "NftablesExpression",
    "NftablesRule",
    "change_destination_port",
    "match_conntrack",
    "match_input_link",
    "match_mark",
    "nftables_rows",
    "notrack",
    "own_rules",
    "remove_table",
    "replace_table",
    "set_mark_bits",
]

PROTOCOL: Final = 12  # NETLINK_NETFILTER
GROUP: Final = 1 << 6  # NFNLGRP_NFTABLES, as a mask
_SUBSYSTEM: Final = 10  # NFNL_SUBSYS_NFTABLES
_NFGENMSG: Final = struct.Struct(">BBH")  # family, version, resource
_INET: Final = 1  # NFPROTO_INET
_BEGIN, _END = 0x10, 0x11  # NFNL_MSG_BATCH_*
_NEW_TABLE, _DEL_TABLE, _NEW_CHAIN, _NEW_RULE, _GET_RULE = 0, 2, 3, 6, 7  # NFT_MSG_*
_GET_TABLE: Final = 1
_NESTED: Final = 0x8000
_U32: Final = struct.Struct(">I")
_HOST_U32: Final = struct.Struct("=I")
_NAME, _RULE_TABLE = 1, 1
_RULE_CHAIN, _RULE_EXPRESSIONS = 2, 4
_REGISTER: Final = 1  # NFT_REG_1
_META_MARK, _META_INPUT_NAME = 3, 6
_CT_DIRECTION, _CT_STATUS = 1, 2
_TRANSPORT: Final = 2  # NFT_PAYLOAD_TRANSPORT_HEADER
_LINK_NAME: Final = 16  # IFNAMSIZ
_LARGEST: Final = 1 << 16

ORIGINAL: Final = b"\0"
"""Conntrack direction of the initiator's packets (IP_CT_DIR_ORIGINAL)."""
TRANSLATED: Final = 1 << 5
"""Conntrack status bit of connections with a translated destination (IPS_DST_NAT)."""

OWN_TABLE: Final = "hive-proxy"
"""The name of the agent's inet table."""
NOT_SUPPORTED: Final = frozenset({errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL, errno.EPROTONOSUPPORT})
"""Errnos of kernels without nftables."""

NftablesExpression = bytes
"""One expression of a rule, encoded."""


class NftablesRule(msgspec.Struct, frozen=True):
    """A rule: its expressions match packets, then act on them."""

    expressions: tuple[NftablesExpression, ...]


class NftablesChain(msgspec.Struct, frozen=True):
    """A base chain of type filter, with policy accept, and its rules."""

    name: str
    hook: int
    """NF_INET_*: 0 prerouting, 3 output, 4 postrouting."""
    priority: int
    rules: tuple[NftablesRule, ...]


def _nested(kind: int, *parts: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(parts))


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, _U32.pack(value & 0xFFFFFFFF))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _data(kind: int, value: bytes) -> bytes:
    return _nested(kind, attribute(1, value))


def _expression(name: str, *parts: bytes) -> NftablesExpression:
    return _nested(1, _text(1, name), _nested(2, *parts))


def _equals(value: bytes) -> NftablesExpression:
    return _expression("cmp", _number(1, _REGISTER), _number(2, 0), _data(3, value))


def _bits(size: int, mask: bytes, flip: bytes) -> NftablesExpression:
    """Encode a bitwise expression: register = (register & mask) ^ flip."""
    register = _number(1, _REGISTER) + _number(2, _REGISTER)
    return _expression("bitwise", register, _number(3, size), _data(4, mask), _data(5, flip))


def match_mark(mask: int, value: int) -> tuple[NftablesExpression, ...]:
    """Match packets with ``mark & mask == value``."""
    read = _expression("meta", _number(2, _META_MARK), _number(1, _REGISTER))
    masked = _bits(4, _HOST_U32.pack(mask), bytes(4))
    return read, masked, _equals(_HOST_U32.pack(value))


def set_mark_bits(clear: int, bits: int) -> tuple[NftablesExpression, ...]:
    """Clear the bits ``clear`` of the mark and set ``bits``."""
    read = _expression("meta", _number(2, _META_MARK), _number(1, _REGISTER))
    changed = _bits(4, _HOST_U32.pack(~(clear | bits) & 0xFFFFFFFF), _HOST_U32.pack(bits))
    return read, changed, _expression("meta", _number(2, _META_MARK), _number(3, _REGISTER))


def match_input_link(name: str) -> tuple[NftablesExpression, ...]:
    """Match packets received on the link of this name."""
    read = _expression("meta", _number(2, _META_INPUT_NAME), _number(1, _REGISTER))
    return read, _equals(name.encode().ljust(_LINK_NAME, b"\0"))


def match_conntrack(*, direction: bytes, status: int) -> tuple[NftablesExpression, ...]:
    """Match packets of one conntrack direction, of connections with these status bits."""
    bits = _HOST_U32.pack(status)
    return (
        _expression("ct", _number(2, _CT_DIRECTION), _number(1, _REGISTER)),
        _equals(direction),
        _expression("ct", _number(2, _CT_STATUS), _number(1, _REGISTER)),
        _bits(4, bits, bytes(4)),
        _equals(bits),
    )


def notrack() -> NftablesExpression:
    """Exempt the packet from connection tracking."""
    return _nested(1, _text(1, "notrack"))


def change_destination_port(flip: int, checksum: int) -> tuple[NftablesExpression, ...]:
    """Flip bits of the destination port. ``checksum`` is the offset of the transport header's checksum."""
    place = _number(2, _TRANSPORT) + _number(3, 2) + _number(4, 2)
    read = _expression("payload", _number(1, _REGISTER), place)
    flipped = _bits(2, b"\xff\xff", flip.to_bytes(2, "big"))
    fixed = _number(6, 1) + _number(7, checksum)  # NFT_PAYLOAD_CSUM_INET
    return read, flipped, _expression("payload", _number(5, _REGISTER), place, fixed)


def nftables_rows(kind: int, family: int, table: str = "") -> list[dict[int, bytes]]:
    """Dump the attributes of all objects of a kind (NFT_MSG_GET*) in a family. Raises NetlinkError.

    ``table`` limits a dump of rules to one table.
    """
    body = _NFGENMSG.pack(family, 0, 0) + (_text(_RULE_TABLE, table) if table else b"")
    request = Request("read tables of nftables", _SUBSYSTEM << 8 | kind, NLM_F_DUMP, body)
    with connected(protocol=PROTOCOL) as connection:
        rows = connection.dump(request)
    return [dict(attributes(row.body, _NFGENMSG.size)) for row in rows]


def own_rules(table: str) -> list[tuple[bytes, bytes]]:
    """Return (chain, encoded expressions) of each rule of an inet table. Raises NetlinkError."""
    rows = nftables_rows(_GET_RULE, _INET, table)
    return [(row[_RULE_CHAIN], row.get(_RULE_EXPRESSIONS, b"")) for row in rows]


def replace_table(table: str, chains: Iterable[NftablesChain]) -> None:
    """Replace an inet table and its chains atomically. Raises NetlinkError."""
    requests = [_table(_NEW_TABLE, table), _table(_DEL_TABLE, table), _table(_NEW_TABLE, table)]
    for chain in chains:
        requests.append(_chain(table, chain))
        requests += [_rule(table, chain.name, rule) for rule in chain.rules]
    _commit(requests)


def remove_table(table: str) -> bool:
    """Remove an inet table with its chains; return False if there is none. Raises NetlinkError."""
    names = [row[_NAME].rstrip(b"\0").decode(errors="replace") for row in nftables_rows(_GET_TABLE, _INET)]
    if table not in names:
        return False
    _commit([_table(_DEL_TABLE, table)])
    return True


def _request(what: str, kind: int, *parts: bytes) -> Request:
    flags = NLM_F_CREATE if kind != _DEL_TABLE else 0
    return Request(what, _SUBSYSTEM << 8 | kind, flags, _NFGENMSG.pack(_INET, 0, 0) + b"".join(parts))


def _table(kind: int, name: str) -> Request:
    return _request(f"replace the table inet {name} of nftables", kind, _text(_NAME, name))


def _chain(table: str, chain: NftablesChain) -> Request:
    hook = _nested(4, _number(1, chain.hook), _number(2, chain.priority))
    what = f"add the chain {chain.name} to the table inet {table} of nftables"
    return _request(what, _NEW_CHAIN, _text(1, table), _text(3, chain.name), hook, _text(7, "filter"))


def _rule(table: str, chain: str, rule: NftablesRule) -> Request:
    what = f"add a rule to the chain {chain} of the table inet {table} of nftables"
    expressions = _nested(_RULE_EXPRESSIONS, *rule.expressions)
    request = _request(what, _NEW_RULE, _text(_RULE_TABLE, table), _text(_RULE_CHAIN, chain), expressions)
    return request._replace(flags=request.flags | 0x800)  # NLM_F_APPEND


def _commit(requests: Sequence[Request]) -> None:
    """Send the requests as one transaction; an error of any request aborts all of them.

    The last request is acknowledged, so its answer arrives after the commit.
    """
    *others, last = requests
    edge = _NFGENMSG.pack(0, 0, _SUBSYSTEM)
    batch = [
        Request("begin a transaction of nftables", _BEGIN, 0, edge),
        *others,
        last._replace(flags=last.flags | NLM_F_ACK),
    ]
    end = Request("commit a transaction of nftables", _END, 0, edge)
    descriptor = open_socket(protocol=PROTOCOL)

    def receive(what: str) -> bytes:
        try:
            return os.read(descriptor, _LARGEST)
        except OSError as error:
            raise NetlinkError(error.errno or 0, what, "on reading the answer") from error

    try:
        os.write(descriptor, encode([*batch, end], 1))
        answers(batch, 1, receive)
    finally:
        os.close(descriptor)
