"""cni.sock with arbitrary packets: each gets a reply, and no partial state is left."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import example, given
from hypothesis import strategies as st

from cells.cni.add import INTERNAL
from cells.endpoint.state.saved import encode
from lifecycle.testing import eventually
from tests.support.cni_plugin import HEADER
from tests.unit.cni_server.fakes import FakeNode
from tests.unit.cni_server.harness import Client, Harness, Reply, harness
from tests.unit.fuzz.inputs import bounded, damaged, nested, odd_bytes

CONF = {
    "cniVersion": "1.0.0",
    "name": "cilium",
    "type": "cilium-cni",
    "ipam": {"type": ""},
    "prevResult": {"interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"address": "10.0.0.1/32"}]},
    "macAddrMode": "random",
    "fixedMac": "02:00:00:00:00:01",
    "prefixMacMap": {"web": "02:00:00:00:00:02"},
    "runtimeConfig": {
        "io.kubernetes.cri.pod-annotations": {"cni.cilium.io/mac-address": "02:00:00:00:00:03"}
    },
    "cni.dev/valid-attachments": [{"containerID": "cid1", "ifname": "eth0"}],
    "chaining-mode": "",
}
PLAIN = json.dumps({"cniVersion": "1.1.0", "name": "cilium"}).encode()
COMMANDS = (b"ADD", b"DEL", b"CHECK", b"STATUS", b"GC", b"VERSION", b"", b"add")


def packed(env: bytes, stdin: bytes, *, magic: bytes = b"HCNI", version: int = 1) -> bytes:
    """A request packet of raw parts."""
    return HEADER.pack(magic, version, 0, len(env), len(stdin)) + env + stdin


@st.composite
def environments(draw: st.DrawFn) -> bytes:
    values = {
        b"CNI_COMMAND": draw(st.sampled_from(COMMANDS)),
        b"CNI_CONTAINERID": draw(st.sampled_from([b"cid1", b"cid2", b""]) | odd_bytes),
        b"CNI_IFNAME": draw(st.sampled_from([b"eth0", b""]) | odd_bytes),
        b"CNI_NETNS": draw(st.just(b"/run/netns/pod") | odd_bytes),
        b"CNI_ARGS": draw(
            st.sampled_from(
                [
                    b"",
                    b"IgnoreUnknown=1;K8S_POD_NAME=web-0",
                    b"K8S_POD_NAME=\xff\xfe",
                    b"IgnoreUnknown=x",
                    b";=",
                ]
            )
            | odd_bytes
        ),
    }
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=1)):
        del values[name]
    return b"".join(name + b"=" + value + b"\0" for name, value in values.items())


packets = st.one_of(
    odd_bytes.filter(bool),
    st.builds(packed, odd_bytes, odd_bytes, version=st.integers(0, 65535)),
    st.builds(packed, environments(), damaged(CONF)),
    st.builds(packed, environments(), st.just(PLAIN)),
    st.builds(HEADER.pack, st.just(b"HCNI"), st.just(1), st.just(0), st.integers(0, 2**32 - 1), st.just(5)),
)


async def exchange(made: Harness, packet: bytes, descriptors: int) -> Reply | None:
    """Send a packet; its answer, None when the connection is closed without one."""
    client = Client(made.path)
    with anyio.fail_after(30):
        await client.connect()
        made.pod("pod")
        fds = [os.open(made.folder / "pod", os.O_RDONLY) for _ in range(descriptors)]
        try:
            client.send(packet, fds)
        finally:
            for fd in fds:
                os.close(fd)
        with suppress(ConnectionError):
            return await client.reply()
    return None


async def listen_for_faults(faults: list[str]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(str(context)))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_every_packet_is_answered_and_nothing_is_left_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.server.netns_cookie", FakeNode().cookie)
    faults: list[str] = []
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(harness(tmp_path)) as made,
    ):
        portal.call(listen_for_faults, faults)
        portal.call(made.call, "STATUS")
        before = descriptors()

        @bounded(300)
        @example(packed(b"CNI_COMMAND=ADD\0CNI_CONTAINERID=c\0", b'{"name":"\xff"}'), 2)
        @example(packed(b"CNI_COMMAND=ADD\0CNI_CONTAINERID=c\0", nested(990)), 2)
        @example(packed(b"CNI_COMMAND=ADD\0CNI_CONTAINERID=c\0CNI_ARGS=K8S_POD_NAME=\xff\0", PLAIN), 2)
        @given(packets, st.sampled_from([0, 2, 2, 2, 1, 3]))
        def is_answered(packet: bytes, count: int) -> None:
            reply = portal.call(exchange, made, packet, count)
            assert not faults, faults
            if count not in {0, 2}:
                assert reply is None
                return
            assert reply is not None
            if reply.code:
                assert reply.json["code"] > 0
                assert reply.message
                assert INTERNAL not in reply.message
            node = made.node
            for endpoint in node.book.values():
                encode(endpoint)
            assert len(node.links) >= len(node.book)  # a link on its way out takes its time

        is_answered()
        for container in sorted({endpoint.container_id for endpoint in made.node.book.values()}):
            portal.call(made.detacher.detach_container, container)
        portal.call(eventually, made.node.clean)
        assert portal.call(made.call, "ADD").code == 0
        assert portal.call(made.call, "DEL").code == 0
        assert descriptors() <= before
        assert faults == []
