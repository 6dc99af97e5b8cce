"""The plugin's ADD and DEL with a pod's real namespace, against a stub agent."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cells.cni.attach import netns_cookie
from cells.netlink.connection import open_socket
from tests.support.cni_plugin import (
    ADD_PATIENCE_SECONDS,
    Ended,
    Patience,
    Seen,
    StubAgent,
    answer,
    close_all,
    environment,
    hang_up,
    reply,
    run_plugin,
)
from tests.support.namespaces import Namespaces, inside, need_root, new_netns
from tests.support.waiting import eventually

pytestmark = pytest.mark.kernel
RESULT = b'{"cniVersion":"1.0.0"}\n'


@pytest.fixture
def pod() -> Iterator[Namespaces]:
    need_root()
    with new_netns() as made:
        yield made


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    return tmp_path / "cni.sock"


def path_of(pod: Namespaces) -> str:
    return f"/proc/{os.getpid()}/fd/{pod.net}"


def call(command: str, pod: Namespaces, sock: Path, patience: Patience = Patience.USUAL) -> Ended:
    conf = {"cniVersion": "1.0.0", "name": "cilium", "type": "cilium-cni", "agent-socket": str(sock)}
    return run_plugin(environment(command, CNI_NETNS=path_of(pod)), json.dumps(conf).encode(), patience)


def start(command: str, pod: Namespaces, sock: Path) -> tuple[threading.Thread, list[Ended]]:
    """Call it meanwhile: it waits for an agent as long as that may take."""
    ended: list[Ended] = []
    thread = threading.Thread(target=lambda: ended.append(call(command, pod, sock, Patience.ENDLESS)))
    thread.start()
    return thread, ended


def interfaces(pod: Namespaces) -> set[str]:
    with inside(pod):
        return {name for _, name in socket.if_nameindex()}


def test_the_agent_gets_the_namespace_and_a_socket_inside_it(pod: Namespaces, sock: Path) -> None:
    with inside(pod):
        cookie = netns_cookie(own := open_socket())
        os.close(own)
    with StubAgent(sock).answering(answer(reply(0, RESULT))) as agent:
        ended = call("ADD", pod, sock)
    assert (ended.code, ended.stdout) == (0, RESULT.decode())
    (seen,) = agent.requests
    netns_fd, netlink_fd = seen.fds
    assert os.fstat(netns_fd).st_ino == os.fstat(pod.net).st_ino
    assert netns_cookie(netlink_fd) == cookie
    close_all(seen)


def test_a_namespace_under_a_file_is_opened_as_well(pod: Namespaces, sock: Path, tmp_path: Path) -> None:
    link = tmp_path / "netns"
    link.symlink_to(path_of(pod))
    conf = {"cniVersion": "1.0.0", "name": "cilium", "agent-socket": str(sock)}
    with StubAgent(sock).answering(answer(reply(0, RESULT))) as agent:
        ended = run_plugin(environment("ADD", CNI_NETNS=str(link)), conf)
    assert ended.code == 0
    close_all(agent.requests[0])


def test_an_add_with_a_file_that_is_not_a_namespace_fails(
    pod: Namespaces, sock: Path, tmp_path: Path
) -> None:
    conf = {"cniVersion": "1.0.0", "name": "cilium", "agent-socket": str(sock)}
    path = tmp_path / "plain"
    path.touch()
    ended = run_plugin(environment("ADD", CNI_NETNS=str(path)), conf)
    assert ended.json["msg"] == f"opening netns pinned at {path}: open {path}: invalid argument"


def test_without_an_agent_the_add_waits_and_then_fails_with_a_reason(pod: Namespaces, sock: Path) -> None:
    ended = call("ADD", pod, sock)
    assert (ended.code, ended.json["code"]) == (1, 999)
    assert ended.json["msg"] == (
        "unable to connect to Cilium agent: failed to create cilium agent client after"
        f" {ADD_PATIENCE_SECONDS}.000000 seconds timeout:"
        f" dial unix {sock}: connect: no such file or directory\nIs the agent running?"
    )


def test_an_agent_that_starts_late_is_found(pod: Namespaces, sock: Path) -> None:
    thread, ended = start("ADD", pod, sock)
    with StubAgent(sock).answering(answer(reply(0, RESULT))) as agent:
        thread.join()
    assert ended[0].code == 0
    close_all(agent.requests[0])


def test_an_add_the_dying_agent_never_read_goes_to_the_next_one(pod: Namespaces, sock: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
        dying.bind(str(sock))
        dying.listen()
        thread, ended = start("ADD", pod, sock)
        eventually(lambda: select.select([dying], [], [], 0)[0])  # it waits to be accepted
    with StubAgent(sock).answering(answer(reply(0, RESULT))) as agent:
        thread.join()
    assert ended[0].code == 0
    close_all(agent.requests[0])


def test_an_add_with_a_dying_agent_is_repeated_at_the_next_agent(pod: Namespaces, sock: Path) -> None:
    with StubAgent(sock).answering(hang_up, hang_up, answer(reply(0, RESULT))) as agent:
        ended = call("ADD", pod, sock, Patience.ENDLESS)
    assert (ended.code, ended.stdout) == (0, RESULT.decode())
    assert [seen.flags & 1 for seen in agent.requests] == [0, 1, 1]
    for seen in agent.requests:
        close_all(seen)


def test_an_add_with_a_dying_agent_fails_without_another(pod: Namespaces, sock: Path) -> None:
    with StubAgent(sock).answering(hang_up) as agent:
        ended = call("ADD", pod, sock)
    assert (ended.code, ended.json["code"]) == (1, 11)
    assert ended.json["msg"] == (
        f"Cilium agent at {sock} went away before it answered:"
        " the attachment is in an unknown state; delete it and add it again"
    )
    close_all(agent.requests[0])


def test_disable_ipv6_is_cleared_once_when_the_agent_requests_it(pod: Namespaces, sock: Path) -> None:
    switch = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    with inside(pod):
        switch.write_text("1")
    refusal = reply(1, b'{"code":999,"msg":"IPv6 is off"}\n', patch=1)
    with StubAgent(sock).answering(answer(refusal), answer(refusal)) as agent:
        ended = call("ADD", pod, sock)
    assert (ended.code, ended.json["msg"], ended.stderr) == (1, "IPv6 is off", "")
    assert len(agent.requests) == 2
    with inside(pod):
        assert switch.read_text() == "0\n"
    for seen in agent.requests:
        close_all(seen)


@pytest.mark.parametrize(
    ("reserved", "ports", "after"),
    [
        ("", "51871,8472", "8472,51871"),
        ("4000", "8472,51871", "4000,8472,51871"),
        ("", ",".join(map(str, range(20000, 22400, 2))), ",".join(map(str, range(20000, 22400, 2)))),
    ],
    ids=["none before", "some before", "more than a page of text"],
)
def test_ports_that_the_agent_names_are_reserved_in_the_pod(
    pod: Namespaces, sock: Path, reserved: str, ports: str, after: str
) -> None:
    file = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
    with inside(pod):
        file.write_text(reserved)
    with StubAgent(sock).answering(answer(reply(0, RESULT, patch=3, ports=ports.encode()))) as agent:
        ended = call("ADD", pod, sock)
    assert (ended.code, ended.stdout, ended.stderr) == (0, RESULT.decode(), "")
    with inside(pod):
        assert file.read_text().strip() == after
    assert agent.requests[0].flags == 4  # an agent gives ports only to a plugin that knows them
    close_all(agent.requests[0])


def test_ports_that_cannot_be_reserved_are_a_warning(pod: Namespaces, sock: Path) -> None:
    with StubAgent(sock).answering(answer(reply(0, RESULT, patch=3, ports=b"70000"))) as agent:
        ended = call("ADD", pod, sock)
    assert (ended.code, ended.stdout) == (0, RESULT.decode())
    assert "unable to reserve local IP ports: invalid argument" in ended.stderr
    close_all(agent.requests[0])


def test_a_check_without_an_agent_waits_and_returns_try_again_later(pod: Namespaces, sock: Path) -> None:
    ended = call("CHECK", pod, sock)
    assert (ended.code, ended.json["code"], ended.json["msg"]) == (1, 11, "DaemonDown")
    thread, late = start("CHECK", pod, sock)
    with StubAgent(sock).answering(hang_up, answer(reply(0, b""))) as agent:
        thread.join()
    assert (late[0].code, late[0].stdout) == (0, "")
    assert len(agent.requests) == 2
    for seen in agent.requests:
        close_all(seen)


def test_a_delete_without_an_agent_takes_the_interface_down(pod: Namespaces, sock: Path) -> None:
    add_veth(pod)
    assert interfaces(pod) == {"lo", "eth0", "peer0"}
    ended = call("DEL", pod, sock)
    assert (ended.code, ended.stdout) == (0, "")
    assert interfaces(pod) == {"lo"}
    assert len(list((sock.parent / "deleteQueue").glob("*.delete"))) == 1


def test_a_chained_delete_without_an_agent_leaves_the_interface(pod: Namespaces, sock: Path) -> None:
    add_veth(pod)
    conf = {"cniVersion": "1.0.0", "name": "flannel", "agent-socket": str(sock)}
    ended = run_plugin(environment("DEL", CNI_NETNS=path_of(pod)), conf)
    assert ended.code == 0
    assert "eth0" in interfaces(pod)


def test_a_delete_hands_the_namespace_over_too(pod: Namespaces, sock: Path) -> None:
    def check(connected: socket.socket, seen: Seen) -> None:
        assert len(seen.fds) == 2
        connected.send(reply(0, b""))

    with StubAgent(sock).answering(check) as agent:
        assert call("DEL", pod, sock).code == 0
    close_all(agent.requests[0])


def add_veth(pod: Namespaces) -> None:
    """An eth0 in the pod."""
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as netlink:
        netlink.link("add", ifname="eth0", kind="veth", peer={"ifname": "peer0"})
