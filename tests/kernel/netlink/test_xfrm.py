"""XFRM's messages: policies in the kernel, states as iproute2 reads them; a kernel without ESP."""

import errno
import re
import subprocess
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from cells.netlink.wire import HEADER, NLM_F_REQUEST, Request
from cells.netlink.xfrm import (
    Algorithm,
    Direction,
    KeyOctets,
    XfrmKernel,
    XfrmMark,
    XfrmPolicy,
    XfrmState,
    XfrmTemplate,
    add_state,
    read_state,
)
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

OUT = XfrmMark(0x12023E00, 0xFFFFFF00)
STATES = tuple(
    XfrmState(
        source=ip_address(source),
        destination=ip_address(destination),
        spi=3,
        mark=XfrmMark(0x12020D00, 0xFFFF0F00),
        output_mark=XfrmMark(0xD00, 0xFFFFFF00),
        aead=Algorithm("rfc4106(gcm(aes))", KeyOctets(bytes(range(20))), 128) if gcm else None,
        auth=None if gcm else Algorithm("hmac(sha256)", KeyOctets(bytes(32)), 96),
        crypt=None if gcm else Algorithm("cbc(aes)", KeyOctets(bytes(range(16)))),
    )
    for source, destination, gcm in (("10.0.2.1", "10.0.1.1", True), ("fd00::2:1", "fd00::1:1", False))
)


def policies() -> tuple[XfrmPolicy, ...]:
    """One of each kind, in both families."""
    found = []
    for everywhere, network, own, other in (
        ("0.0.0.0/0", "10.0.2.0/24", "10.0.1.1", "10.0.2.1"),
        ("::/0", "fd00:0:0:2::/96", "fd00::1:1", "fd00::2:1"),
    ):
        template = XfrmTemplate(ip_address(own), ip_address(other), 3, 1)
        whole = ip_network(everywhere)
        optional = (XfrmTemplate(optional=True),)
        found += [
            XfrmPolicy(
                direction=Direction.OUT,
                source=whole,
                destination=ip_network(network),
                mark=OUT,
                templates=(template,),
            ),
            XfrmPolicy(direction=Direction.IN, source=whole, destination=whole, templates=optional),
            XfrmPolicy(
                direction=Direction.FWD, source=whole, destination=whole, priority=2975, templates=optional
            ),
            XfrmPolicy(
                direction=Direction.OUT,
                source=whole,
                destination=whole,
                mark=XfrmMark(0xE00, 0xF00),
                priority=100,
                block=True,
            ),
        ]
    return tuple(found)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


async def test_policies_are_made_listed_replaced_and_removed(in_node: None) -> None:
    kernel, made = XfrmKernel(), policies()
    assert await kernel.set_policies(made) == [None] * 8
    assert set(await kernel.policies()) == set(made)
    shown = " ".join(run("ip", "xfrm", "policy", "list").replace("ptype main", "").split())
    assert "src 0.0.0.0/0 dst 10.0.2.0/24 dir out priority 0 mark 0x12023e00/0xffffff00" in shown
    assert "tmpl src 10.0.1.1 dst 10.0.2.1 proto esp spi 0x00000003 reqid 1 mode tunnel" in shown
    assert (
        "dir fwd priority 2975 tmpl src 0.0.0.0 dst 0.0.0.0 proto esp reqid 0 mode tunnel level use" in shown
    )
    assert "src ::/0 dst ::/0 dir out action block priority 100 mark 0xe00/0xf00" in shown
    other = XfrmTemplate(ip_address("10.0.1.1"), ip_address("10.0.2.9"), 3, 1)
    changed = XfrmPolicy(
        direction=Direction.OUT,
        source=made[0].source,
        destination=made[0].destination,
        mark=OUT,
        templates=(other,),
    )
    assert await kernel.set_policies([changed]) == [None]
    assert set(await kernel.policies()) == {changed, *made[1:]}
    assert await kernel.delete_policies([*made, made[0]]) == [None] * 9
    assert await kernel.policies() == []


async def test_policies_of_others_are_read_or_left_out(in_node: None) -> None:
    run("ip", "xfrm", "policy", "add", "src", "10.0.0.0/8", "dst", "10.9.0.0/16", "dir", "out")
    run(
        "ip", "xfrm", "policy", "add", "src", "10.1.0.0/16", "dst", "10.9.0.0/16", "proto", "tcp", "dir", "in"
    )
    (found,) = await XfrmKernel().policies()
    assert found.key == (Direction.OUT, "10.0.0.0/8", "10.9.0.0/16", None)


def as_message(request: Request) -> bytes:
    return (
        HEADER.pack(16 + len(request.body), request.type, request.flags | NLM_F_REQUEST, 1, 0) + request.body
    )


def shown_states(states: Sequence[XfrmState], folder: Path) -> str:
    """The messages that add them, as iproute2 reads them out of a file."""
    path = folder / "messages"
    path.write_bytes(b"".join(as_message(add_state(one)) for one in states))
    return " ".join(run("ip", "xfrm", "monitor", "file", str(path)).split())


def test_states_are_encoded_as_iproute2_reads_them(tmp_path: Path) -> None:
    shown = shown_states(STATES, tmp_path)
    for state in STATES:
        assert (
            f"src {state.source} dst {state.destination} proto esp spi 0x00000003 reqid 1 mode tunnel"
            in shown
        )
    assert shown.count("mark 0x12020d00/0xffff0f00 output-mark 0xd00/0xffffff00") == 2
    assert f"aead rfc4106(gcm(aes)) 0x{bytes(range(20)).hex()} 128" in shown
    assert f"auth-trunc hmac(sha256) 0x{bytes(32).hex()} 96" in shown
    assert f"enc cbc(aes) 0x{bytes(range(16)).hex()}" in shown
    assert len(re.findall(r"replay_window 1024, bitmap-length 32", shown)) == 2
    assert shown.count("flag esn") == 2
    assert [read_state(add_state(one).body) for one in STATES[:1]] == [STATES[0]]


async def test_a_kernel_without_esp_refuses_states_and_names_why(in_node: None) -> None:
    kernel = XfrmKernel()
    refused = await kernel.add_states(STATES)
    assert await kernel.delete_states(STATES) == [None, None]
    assert await kernel.states() == []
    if refused[0] is None:
        pytest.skip("this kernel has ESP")
    assert refused[0].errno in (errno.ENOSYS, errno.EPROTONOSUPPORT, errno.ENOENT)
    assert "AEAD" in str(refused[0]) or "type" in str(refused[0])
    assert bytes(range(20)).hex() not in str(refused[0])
