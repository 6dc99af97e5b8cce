"""Clients of DSR services: the ICMP errors that they receive when the path MTU is too small."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from hive.lab.node import Lab
from tests.node.agent.node_ports import (
    ELSEWHERE,
    FAR_PORT,
    IPV6_MTU,
    NODE,
    SETTINGS,
    TARGET,
    give_addresses,
    service,
    slices,
)
from tests.node.agent.offloads import ETHTOOL_STXCSUM, set_feature
from tests.support.agents import serving
from tests.support.sockets import opened
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

IP_MTU_DISCOVER, IP_PMTUDISC_DONT, IP_PMTUDISC_DO, IP_MTU = 10, 0, 2, 14  # linux/in.h
HEADERS, OPTION = {4: 28, 6: 48}, {4: 8, 6: 24}
MTU = 1500


@pytest.mark.parametrize("acceleration", ["disabled", "generic"])
def test_with_dsr_a_client_hears_how_long_its_datagrams_may_be(
    node: Lab, tmp_path: Path, acceleration: str
) -> None:
    give_addresses(node)
    (tmp_path / "far.yaml").write_text(service("far", FAR_PORT) + slices("far", ELSEWHERE))
    mode = "--routing-mode=native", "--bpf-lb-mode=dsr", f"--bpf-lb-acceleration={acceleration}"
    serving(node, f"--manifests-dir={tmp_path}", *SETTINGS, *mode)
    with node.open_outside() as outside:
        outside.run(set_feature, "node", ETHTOOL_STXCSUM, 0)  # a program in the driver sees checksums
        # The backend is where the client is, and has to take packets that come from itself.
        outside.run(Path("/proc/sys/net/ipv4/conf/node/accept_local").write_text, "1")
        with (
            opened(outside, 4, socket.SOCK_DGRAM) as server,
            opened(outside, 4, socket.SOCK_DGRAM) as client,
        ):
            server.bind((ELSEWHERE[4], TARGET))
            client.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT)
            question = os.urandom(MTU - HEADERS[4])
            for each in (server, client):
                each.settimeout(1)  # one that is sent before the service is there is lost

            def arrives() -> bool:
                client.sendto(question, (NODE[4], FAR_PORT))
                return server.recv(2 * MTU) == question  # in fragments

            eventually(arrives)
        for version, levels in ((4, (socket.IPPROTO_IP, IP_MTU)), (6, (socket.IPPROTO_IPV6, IPV6_MTU))):
            with opened(outside, version, socket.SOCK_DGRAM) as client:
                if version == 4:
                    client.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
                client.connect((NODE[version], FAR_PORT))

                def mtu_known(version: int = version, levels: tuple[int, int] = levels) -> bool:
                    with suppress(OSError):  # too long for what is known by now
                        client.send(bytes(MTU - HEADERS[version]))
                    return client.getsockopt(*levels) == MTU - OPTION[version]

                eventually(mtu_known)
