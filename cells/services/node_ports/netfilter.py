"""Detects netfilter rules of other programs in this network namespace, without changing them.

The cell logs them at start-up.

Source: kube-proxy's chains (iptables) and its tables named kube-proxy (nftables); kernel
include/uapi/linux/netfilter/nf_tables.h, netfilter_ipv4/ip_tables.h (IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES).
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cells.netlink.nftables import NOT_SUPPORTED, OWN_TABLE, nftables_rows

_CHAINS: Final = frozenset({"KUBE-SERVICES", "KUBE-FORWARD", "KUBE-POSTROUTING"})
_TABLE: Final = "kube-proxy"
_FAMILIES: Final = {"inet": 1, "ip": 2, "ip6": 10}  # NFPROTO_INET, NFPROTO_IPV4, NFPROTO_IPV6
_GET_TABLE, _GET_CHAIN = 1, 4  # NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN
_TABLE_NAME = 1
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_USE = 1, 3, 4, 6
_GET_INFO, _GET_ENTRIES = 64, 65
_HOOKS_AT, _COUNT_AT = 32, 76
"""Offsets in struct ipt_getinfo, of 84 bytes: hooks of a table, and its numbers of entries and bytes."""


class FoundRules(msgspec.Struct, frozen=True):
    """Frameworks and tables with rules, by their common names."""

    kube_proxy: list[str]
    others: list[str]
    """Tables without rules of kube-proxy."""


class _Legacy(msgspec.Struct, frozen=True):
    """One family of iptables-legacy."""

    name: str
    tables: Path
    """The file that lists present tables; requesting any other would create it."""
    family: socket.AddressFamily
    level: int


_LEGACY: Final = (
    _Legacy("ip", Path("/proc/net/ip_tables_names"), socket.AF_INET, socket.IPPROTO_IP),
    _Legacy("ip6", Path("/proc/net/ip6_tables_names"), socket.AF_INET6, socket.IPPROTO_IPV6),
)


def found_rules() -> FoundRules:
    """Detect rules of IPv4, IPv6 and inet. Raises OSError."""
    found = FoundRules([], [])
    for of_kube_proxy, name in (*_by_nftables(), *_by_iptables_legacy()):
        where = found.kube_proxy if of_kube_proxy else found.others
        if name not in where:
            where.append(name)
    return found


def _by_nftables() -> Iterator[tuple[bool, str]]:
    for family, number in _FAMILIES.items():
        try:
            tables = {_name(one[_TABLE_NAME]) for one in nftables_rows(_GET_TABLE, number)}
            chains = [
                (_name(one[_CHAIN_TABLE]), _name(one[_CHAIN_NAME]), _rules_of(one))
                for one in nftables_rows(_GET_CHAIN, number)
            ]
        except OSError as error:
            if error.errno in NOT_SUPPORTED:
                return
            raise
        if _TABLE in tables:
            yield True, f"nftables ({family})"
        by_iptables = {table for table, chain, _ in chains if chain in _CHAINS}
        if by_iptables:
            yield True, f"iptables-nft ({family})"
        with_rules = {table for table, _, count in chains if count}
        for table in sorted(with_rules - by_iptables - {_TABLE, OWN_TABLE}):
            yield False, f"nftables {family} {table}"


def _name(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def _rules_of(chain: dict[int, bytes]) -> int:
    """Return the number of a base chain's rules; 0 for other chains, which only jumps reach."""
    return int.from_bytes(chain.get(_CHAIN_USE, b""), "big") if _CHAIN_HOOK in chain else 0


def _by_iptables_legacy() -> Iterator[tuple[bool, str]]:
    for one in _LEGACY:
        try:
            tables = one.tables.read_text(encoding="ascii").split()
        except FileNotFoundError:
            continue
        for table in sorted(tables):
            entries = _entries(one, table.encode())
            if any(name.encode() in entries for name in _CHAINS):
                yield True, f"iptables-legacy ({one.name})"
            elif entries:
                yield False, f"iptables-legacy {one.name} {table}"


def _entries(legacy: _Legacy, table: bytes) -> bytes:
    """Return the raw entries of a table; empty if it has only the hooks' policies and the end marker."""
    with socket.socket(legacy.family, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        info = _get(sock, legacy.level, _GET_INFO, table.ljust(84, b"\0"))
        (hooks,) = struct.unpack_from("I", info, _HOOKS_AT)
        count, size = struct.unpack_from("II", info, _COUNT_AT)
        if count <= hooks.bit_count() + 1:
            return b""
        return _get(sock, legacy.level, _GET_ENTRIES, struct.pack("32sII", table, size, 0) + bytes(size))


def _get(sock: socket.socket, level: int, option: int, asked: bytes) -> bytes:
    """Call getsockopt(2) with a buffer that the kernel also reads."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(asked, len(asked))
    length = ctypes.c_uint(len(asked))
    if libc.getsockopt(sock.fileno(), level, option, answer, ctypes.byref(length)) < 0:
        raise OSError(ctypes.get_errno(), "read the tables of iptables")
    return answer.raw
