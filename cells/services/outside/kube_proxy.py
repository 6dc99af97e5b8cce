"""Whether rules of kube-proxy are in this network namespace: they are looked for, and never touched.

Source: kube-proxy's chain KUBE-SERVICES (iptables) and its tables named kube-proxy (nftables); kernel
        include/uapi/linux/netfilter_ipv4/ip_tables.h (IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES).
Needs:  CAP_NET_ADMIN.   Gives: rules_of_kube_proxy().
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CHAIN: Final = "KUBE-SERVICES"
_TABLE: Final = "kube-proxy"
_LEGACY: Final = Path("/proc/net/ip_tables_names")
"""Tables there are; to ask for one that is not would make it."""
_FAMILIES: Final = {"ip": 2, "ip6": 10}  # NFPROTO_IPV4, NFPROTO_IPV6
_GET_INFO, _GET_ENTRIES = 64, 65
_SIZE_AT = 80
"""Where struct ipt_getinfo, of 84 bytes, has the size of all entries."""


def rules_of_kube_proxy() -> list[str]:
    """Where there are any, as people call it; raises OSError."""
    return [*_by_nftables(), *_by_iptables_legacy()]


def _by_nftables() -> Iterator[str]:
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.nftables.main import NFTables

    for name, family in _FAMILIES.items():
        try:
            with NFTables(nfgen_family=family) as nftables:
                tables = {one.get_attr("NFTA_TABLE_NAME") for one in nftables.get_tables()}
                chains = {one.get_attr("NFTA_CHAIN_NAME") for one in nftables.get_chains()}
        except NetlinkError as error:
            if error.code in {errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL}:
                return  # no nftables in this kernel
            raise OSError(error.code, f"read tables of nftables: {error}") from error
        if _TABLE in tables:
            yield f"nftables ({name})"
        if _CHAIN in chains:
            yield f"iptables-nft ({name})"


def _by_iptables_legacy() -> Iterator[str]:
    try:
        there = "nat" in _LEGACY.read_text(encoding="ascii").split()
    except FileNotFoundError:
        return
    if there and _CHAIN.encode() in _entries_of_nat():
        yield "iptables-legacy (ip)"


def _entries_of_nat() -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        info = _get(sock, _GET_INFO, b"nat".ljust(84, b"\0"))
        (size,) = struct.unpack_from("I", info, _SIZE_AT)
        return _get(sock, _GET_ENTRIES, struct.pack("32sII", b"nat", size, 0) + bytes(size))


def _get(sock: socket.socket, option: int, asked: bytes) -> bytes:
    """As socket.getsockopt(), of which the kernel reads what it is asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(asked, len(asked))
    length = ctypes.c_uint(len(asked))
    if libc.getsockopt(sock.fileno(), socket.IPPROTO_IP, option, answer, ctypes.byref(length)) < 0:
        raise OSError(ctypes.get_errno(), "read the table nat of iptables")
    return answer.raw
