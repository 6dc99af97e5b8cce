"""DNS servers that are slow, lie, or send oversized or unreadable responses."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from cells.proxy.dns.proxy import MAX_CONNECTIONS_PER_POD, MAX_QUERIES_PER_POD
from hive.lab import pods
from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, Lab
from tests.node.agent.manifests import labels_of, pod, write
from tests.support.dns import query
from tests.support.dns_script import (
    LARGEST_TCP,
    LARGEST_UDP,
    LIE,
    SLOW,
    TRUE,
    addresses_of,
    ask,
    send,
    serve,
    served,
)
from tests.support.fqdn_scenario import REFUSED, FQDNScenario, fqdn_scenario
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

FORMERR, SERVFAIL, NOTIMP = 1, 2, 4
TRUNCATED = 0x02


def code(answer: bytes) -> int:
    return answer[3] & 0xF


def odd(place: FQDNScenario) -> str:
    """A second server of the policy's; its address, once its labels are known."""
    write(place.folder, "odd", pod("odd", {"app": "dns"}))
    address = pods.add(place.node, "odd").ipv4
    eventually(lambda: "k8s:app=dns" in labels_of(place.pid, "odd"))
    return address


def test_a_bad_server_harms_only_what_it_is_asked(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path) as place:
        server = odd(place)
        with node.open_pod("odd") as there:
            serving = there.start(serve)
            eventually(lambda: there.run(served, within=60))
            here = place.here

            def spoken(name: str, *, tcp: bool = False, edns: int = 0) -> bytes:
                return here.run(partial(ask, server, f"{name}.example.org", tcp=tcp, edns=edns), within=60)

            for tcp in (False, True):
                assert addresses_of(spoken("plain", tcp=tcp)) == [TRUE]
            slow = here.start(_timed, server)
            with pytest.raises(TimeoutError):
                here.run(partial(ask, server, "silent.example.org", SLOW))
            assert place.look().code == 0, "nobody else waits"
            assert addresses_of(slow.result(within=60)) == [TRUE]
            assert addresses_of(spoken("forged")) == [TRUE], "guesses are passed over"
            assert code(spoken("forged", tcp=True)) == SERVFAIL, "on a connection nothing else can be meant"
            assert code(spoken("crossed", tcp=True)) == SERVFAIL, "it answers what nobody asked"
            for tcp in (False, True):
                assert addresses_of(spoken("chain", tcp=tcp)) == [TRUE]
                assert code(spoken("failed", tcp=tcp)) == SERVFAIL
                assert spoken("unread", tcp=tcp)[2:] == b"\x80\x81" + bytes(8), "as the server sent it"
            short = spoken("short")
            assert (short[2] & TRUNCATED, addresses_of(short)) == (TRUNCATED, []), "the pod asks by TCP"
            assert addresses_of(spoken("short", tcp=True)) == [TRUE]
            for tcp in (False, True):
                assert code(spoken("loop", tcp=tcp)) == 0
                assert code(spoken("others", tcp=tcp)) == 0
                for what in ("pointer", "cut", "noise"):
                    assert code(spoken(what, tcp=tcp)) == SERVFAIL, (what, tcp)
            assert len(addresses_of(spoken("huge", edns=4096))) == LARGEST_UDP, "in fragments"
            assert len(addresses_of(spoken("huge", tcp=True))) == LARGEST_TCP
            known = {(name, ip) for name, ip, _ in place.cached}
            assert {("plain.example.org.", TRUE), ("chain.example.org.", TRUE)} <= known
            for name in ("crossed", "another", "failed"):
                assert not any(one == f"{name}.example.org." for one, _ in known), name
            assert not any(name == "web.example.org." and ip == LIE for name, ip in known)
            assert not any(name == "forged.example.org." and ip == LIE for name, ip in known)
            retained = sum(name == "huge.example.org." and of == "lookup" for name, _, of in place.cached)
            assert retained == 1000, "no more addresses of a name count"
            assert place.look().code == 0
            asked = serving.finish(within=60)
        address = place.here.run(_own, server)
        assert asked == {address}, "the server sees the pod itself"


def test_servers_may_be_asked_from_the_nodes_address(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path, "--dnsproxy-enable-transparent-mode=false") as place:
        server = odd(place)
        with node.open_pod("odd") as there:
            serving = there.start(serve)
            eventually(lambda: there.run(served, within=60))
            for tcp in (False, True):
                found = place.here.run(partial(ask, server, "plain.example.org", tcp=tcp), within=60)
                assert addresses_of(found) == [TRUE]
            found = place.here.run(partial(ask, server, "forged.example.org"), within=60)
            assert addresses_of(found) == [TRUE], "guesses and noise are passed over"
            (asked,) = serving.finish(within=60)
        assert asked != place.here.run(_own, server)
        assert asked != NODE_ADDRESS, "by its address towards pods"


def test_invalid_queries_are_answered_as_by_a_server(node: Lab, tmp_path: Path) -> None:
    asked = query("web.example.org")
    update = asked[:2] + b"\x28\0" + asked[4:]
    with fqdn_scenario(node, tmp_path) as place:
        for tcp in (False, True):
            for message, expected in ((asked[:-1], FORMERR), (update, NOTIMP)):
                found = place.here.run(partial(send, place.server.ipv4, message, tcp=tcp), within=60)
                assert (found[:2], code(found)) == (message[:2], expected)


@pytest.mark.parametrize(("grace", "expected"), [(0, SERVFAIL), (8, 0)])
def test_the_concurrency_limit_holds_for_udp_and_tcp(
    node: Lab, tmp_path: Path, grace: int, expected: int
) -> None:
    limit = "--dnsproxy-concurrency-limit=1", f"--dnsproxy-concurrency-processing-grace-period={grace}s"
    with fqdn_scenario(node, tmp_path, *limit) as place:
        server = odd(place)
        with node.open_pod("odd") as there:
            serving = there.start(serve)
            eventually(lambda: there.run(served, within=60))
            for tcp in (True, False):
                holding = place.here.start(_silent, server)
                eventually(lambda: there.run(_has_connection, within=60))
                found = place.here.run(partial(ask, server, "plain.example.org", tcp=tcp), within=60)
                assert code(found) == expected
                assert code(holding.result(within=60)) == SERVFAIL
                found = place.here.run(partial(ask, server, "plain.example.org", tcp=tcp), within=60)
                assert code(found) == 0, "the slot is free again"
                eventually(lambda: not there.run(_has_connection, within=60))
            serving.finish(within=60)


def test_a_pod_with_too_many_waiting_queries_gets_servfail(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path) as place:
        server = odd(place)
        with node.open_pod("odd") as there, ExitStack() as stack:
            serving = there.start(serve)
            eventually(lambda: there.run(served, within=60))
            with inside(place.here):
                flood = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                flood.connect((server, 53))
            for number in range(MAX_QUERIES_PER_POD):
                flood.send(query("silent.example.org", number=number))
                if number % 100 == 0:
                    place.look()  # so that those before have been read
            assert code(place.here.run(partial(ask, server, "plain.example.org"), within=60)) == SERVFAIL
            assert place.look(tcp=True).code == 0
            eventually(lambda: place.look().code == 0)  # once the proxy waits no longer for the others
            serving.finish(within=60)


def _silent(_stop: object, server: str) -> bytes:
    return ask(server, "silent.example.org", tcp=True)


def _has_connection() -> bool:
    """Whether a connection to the DNS server of this namespace is established."""
    lines = Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
    return any(fields[1].endswith(":0035") and fields[3] == "01" for fields in map(str.split, lines))


LONG = 400
"""Queries on one connection."""


def test_each_query_of_a_long_dns_tcp_connection_is_filtered(node: Lab, tmp_path: Path) -> None:
    """Cut anywhere, many at once, and while other connections of the pod say nothing or read nothing."""
    with fqdn_scenario(node, tmp_path) as place:
        server = odd(place)
        with node.open_pod("odd") as there, ExitStack() as stack:
            serving = there.start(serve)
            eventually(lambda: there.run(served, within=60))
            with inside(place.here):
                deaf = _connected(stack, server)
                huge = query("huge.example.org")
                deaf.sendall((len(huge).to_bytes(2, "big") + huge) * 100)
                silent = [_connected(stack, place.server.ipv4) for _ in range(MAX_CONNECTIONS_PER_POD + 8)]
                for one in silent[::2]:
                    with suppress(OSError):
                        one.sendall(b"\0\x40\1")
            eventually(lambda: sum(map(_ended, silent)) >= 8, within=8)  # of one pod so many are served
            assert place.look().code == 0, "by UDP it is served all the same"
            for one in silent:
                one.close()
            eventually(lambda: place.look(tcp=True).code == 0)  # once the others are closed
            codes = place.here.run(_converse, server, within=120)
            assert codes == [REFUSED if number % 3 == 0 else 0 for number in range(LONG)]
            eventually(lambda: _is_reset(deaf))  # as it takes no answers
            serving.finish(within=60)


def _is_reset(connection: socket.socket) -> bool:
    looking = select.poll()
    looking.register(connection, 0)
    return any(event & select.POLLHUP for _, event in looking.poll(0))


def _connected(stack: ExitStack, server: str) -> socket.socket:
    return stack.enter_context(socket.create_connection((server, 53), 10))


def _ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _converse(server: str) -> list[int]:
    """Ask on one connection, every third query for a name that is forbidden; the codes of the answers."""
    names = ("plain.example.com", "plain.example.org", "chain.example.org")
    queries = [query(names[number % 3], number=number) for number in range(LONG)]
    stream = b"".join(len(one).to_bytes(2, "big") + one for one in queries)
    found = []
    with socket.create_connection((server, 53), 20) as client, client.makefile("rb") as answers:
        for at in range(0, len(stream), 1009):
            client.sendall(stream[at : at + 1009])
        for number in range(LONG):
            answer = answers.read(int.from_bytes(answers.read(2), "big"))
            assert int.from_bytes(answer[:2], "big") == number, "in turn"
            found.append(code(answer))
    return found


def _timed(_stop: object, server: str) -> bytes:
    return ask(server, "slow.example.org")


def _own(server: str) -> str:
    """The address from which this namespace sends there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server, 53))
        return str(probe.getsockname()[0])
