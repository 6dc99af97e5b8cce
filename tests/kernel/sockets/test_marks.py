"""Sockets of the DNS proxy: marks of those that query for a pod, and buffer sizes."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cells.proxy.dns.sockets import BUFFER_SIZE, EGRESS_PROXY, query_socket, udp_listener

pytestmark = pytest.mark.kernel

pods = st.sampled_from([256, 32767, 32768, 65535, 1 << 16, 1 << 23]) | st.integers(1, (1 << 24) - 1)


@given(pods, st.sampled_from([4, 6]), st.sampled_from([socket.SOCK_STREAM, socket.SOCK_DGRAM]))
@example(32768, 4, socket.SOCK_DGRAM)
@example((1 << 24) - 1, 6, socket.SOCK_STREAM)
def test_sockets_of_the_dns_proxy_have_the_mark_of_the_identity_of_the_pod(
    identity: int, version: int, kind: socket.SocketKind
) -> None:
    with query_socket(version, identity, kind) as made:
        (mark,) = struct.unpack("=I", made.getsockopt(socket.SOL_SOCKET, socket.SO_MARK, 4))
    assert mark & 0x0F00 == EGRESS_PROXY
    assert mark >> 16 | (mark & 0xFF) << 16 == identity


@given(st.integers(1 << 24, (1 << 32) - 1))
def test_an_identity_that_no_mark_holds_is_in_none(identity: int) -> None:
    with query_socket(4, identity, socket.SOCK_DGRAM) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_buffer_of_queries_is_larger_than_net_core_rmem_max(family: socket.AddressFamily) -> None:
    with udp_listener(family, 0) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * BUFFER_SIZE  # socket(7)
