"""cni.sock: authorization, accepted messages, and the socket file."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from pathlib import Path

import pytest
import structlog

from cells.cni.transport import TURN_SECONDS, PacketServer, PluginConnection, listen
from lifecycle import HiveError, UsageError
from lifecycle.testing import eventually
from tests.support.cni_plugin import HEADER, environment
from tests.unit.cni_server.harness import Client, Harness, harness, request

pytestmark = pytest.mark.anyio
CONF = b'{"cniVersion":"1.0.0","name":"cilium"}'


async def test_only_root_can_reach_the_socket(served: Harness) -> None:
    assert served.path.stat().st_mode & 0o7777 == 0o600


async def test_another_user_is_refused(tmp_path: Path) -> None:
    server = PacketServer(
        lambda *_: pytest.fail("handed over"), structlog.get_logger(), uids=(os.getuid() + 1,)
    )
    server.start(listen(tmp_path / "cni.sock"))
    client = Client(tmp_path / "cni.sock")
    await client.connect()
    client.send(request(environment("ADD"), CONF), [])
    reply = await client.reply()
    assert reply.code == 1
    assert reply.message == f"cni.sock requires uid 0, the caller has uid {os.getuid()}"
    server.stop()


async def test_a_plugin_of_another_version_gets_an_error_with_both_versions(served: Harness) -> None:
    client = Client(served.path)
    await client.connect()
    client.send(request(environment("DEL"), CONF, version=9), [])
    reply = await client.reply()
    assert reply.code == 1
    assert reply.message == (
        "the plugin speaks version 9 of the cni.sock protocol, this agent 1:"
        " install the plugin that came with the agent"
    )


@pytest.mark.parametrize(
    "packet", [b"x", b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(b"HCNI", 1, 0, 5, 5), request({}, b"{")]
)
async def test_malformed_packets_are_answered_with_an_error(served: Harness, packet: bytes) -> None:
    client = Client(served.path)
    await client.connect()
    client.send(packet, [])
    assert (await client.reply()).code == 1


async def test_a_packet_with_one_descriptor_is_dropped(served: Harness) -> None:
    client = Client(served.path)
    await client.connect()
    fd = os.open("/dev/null", os.O_RDONLY)
    client.send(request(environment("ADD"), CONF), [fd])
    os.close(fd)
    with pytest.raises(ConnectionError):
        await client.reply()


async def test_a_plugin_that_is_slow_to_send_is_served(served: Harness) -> None:
    silent, dead = Client(served.path), Client(served.path)
    await silent.connect()
    await dead.connect()
    assert (await served.call("ADD")).code == 0
    dead.close()
    silent.send(request(environment("DEL"), CONF), [])
    assert (await silent.reply()).code == 0


async def test_many_at_once_are_all_served(served: Harness) -> None:
    replies = await asyncio.gather(*(served.call("ADD", f"cid{n}", pod=f"pod{n}") for n in range(200)))
    assert {reply.code for reply in replies} == {0}
    assert len(served.node.book) == 200


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_descriptor_is_left_open(served: Harness) -> None:
    await served.call("ADD")
    before = open_descriptors()
    for _ in range(20):
        await served.call("ADD")
        await served.call("DEL", "unknown", pod="pod9")
    served.node.refuse.add("configure")
    await served.call("ADD", "cid2", pod="pod2")
    await eventually(lambda: open_descriptors() <= before)


async def test_a_plugin_not_heard_at_the_stop_knows_that_nothing_was_done(tmp_path: Path) -> None:
    async with harness(tmp_path) as served:
        path = served.path
        client = Client(path)
        await client.connect()
        # the server has not had a turn of the loop since: the request is unread
        client.send(request(environment("DEL"), CONF), [])
    with pytest.raises(ConnectionResetError):
        await client.reply()
    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    listen(tmp_path / "cni.sock").close()
    listen(tmp_path / "cni.sock").close()


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_live_socket_is_not_stolen(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "cni.sock"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(HiveError, match=r"another process serves .*: stop that agent, or choose another"):
            listen(path)
    assert path.exists()


def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "cni.sock").touch()
    with pytest.raises(HiveError, match="is in the way and is not a socket"):
        listen(tmp_path / "cni.sock")
    assert (tmp_path / "cni.sock").exists()


def test_a_path_too_long_for_a_socket_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected at most 107 bytes; shorten state-dir"):
        listen(tmp_path / ("x" * 120))


def test_a_missing_directory_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(HiveError, match=r"CNI socket .* cannot be made: No such file or directory"):
        listen(tmp_path / "gone" / "cni.sock")


@pytest.mark.parametrize("early", [True, False], ids=["sent at once", "sent later"])
async def test_many_long_calls_leave_the_loop_to_others_in_between(early: bool, tmp_path: Path) -> None:
    done: list[str] = []

    def handle(connection: PluginConnection, packet: memoryview) -> None:
        began = time.monotonic()
        while time.monotonic() - began < TURN_SECONDS:
            pass
        done.append(bytes(packet).decode())
        connection.close()

    async def others() -> None:
        while True:
            done.append("others")
            await asyncio.sleep(0)

    server = PacketServer(handle, structlog.get_logger(), uids=(os.getuid(),))
    listener = listen(tmp_path / "cni.sock")
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
    for client in clients:
        client.connect(str(tmp_path / "cni.sock"))
        if early:
            client.send(b"call")
    server.start(listener)
    if not early:
        await eventually(lambda: len(server.silent) == len(clients))
        for client in clients:
            client.send(b"call")
    busy = asyncio.create_task(others())
    await eventually(lambda: done.count("call") == len(clients))
    busy.cancel()
    calls = [number for number, what in enumerate(done) if what == "call"]
    assert all("others" in done[one:following] for one, following in itertools.pairwise(calls))
    for client in clients:
        client.close()
    server.stop()
