"""Rules that speak of HTTP, and the world outside the node: who asks stays who asks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hive.lab.namespaces import Namespaces
from hive.lab.node import Lab
from tests.node.agent.test_node_port import (
    NODE,
    NODE_PORT,
    OUTSIDE,
    command,
    give_addresses,
    service,
    slices,
)
from tests.support.requests import (
    PORT,
    PUBLIC,
    Answer,
    Shop,
    answering,
    ask_http,
    of_entities,
    policy,
    shop,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

DUAL = "--ipv6-range=fd00:5::/112"
SERVICES = (DUAL, "--enable-node-port=true")


def _says(where: Namespaces, address: str, path: str, status: int, port: int = PORT) -> bool:
    return where.run(partial(ask_http, address, path, port=port)).status == status


def _asked_from_outside(place: Shop, outside: Namespaces) -> None:
    """A policy about the world is in force at a node port, for both families."""
    backends = {4: place.server.ipv4, 6: place.server.ipv6}
    (place.folder / "near.yaml").write_text(service("near", NODE_PORT) + slices("near", backends))
    place.rule(of_entities(policy(PUBLIC), "world"))
    for version in (4, 6):
        at = partial(ask_http, NODE[version], port=NODE_PORT)
        eventually(partial(_says, outside, NODE[version], "/public/1", 200, NODE_PORT))
        assert outside.run(at, "/public/1") == (200, OUTSIDE[version]), "the server sees the client"
        assert outside.run(at, "/secret") == (403, "Access denied\r\n")
        for number in range(20):
            assert outside.run(at, f"/public/{number}").status == 200


def test_a_client_outside_asks_a_node_port(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with shop(node, tmp_path, *SERVICES) as place, node.open_outside() as outside:
        _asked_from_outside(place, outside)


def test_a_client_outside_asks_a_node_port_that_a_driver_serves(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with (
        shop(node, tmp_path, *SERVICES, "--bpf-lb-acceleration=generic") as place,
        node.open_outside() as outside,
    ):
        _asked_from_outside(place, outside)


def _seen(place: Shop, version: int) -> Answer:
    return place.here.run(ask_http, OUTSIDE[version], "/public/1")


def test_a_server_outside_sees_the_pod_that_asks(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    settings = (DUAL, "--enable-ipv4-masquerade=false", "--enable-ipv6-masquerade=false")
    with shop(node, tmp_path, *settings) as place, node.open_outside() as outside, answering(outside):
        outside.run(command, f"route add {place.client.ipv4} via {NODE[4]}")
        outside.run(command, f"route add {place.client.ipv6} via {NODE[6]}")
        place.rule(of_entities(policy(PUBLIC, direction="egress"), "world"))
        for version, own in ((4, place.client.ipv4), (6, place.client.ipv6)):
            eventually(partial(_says, place.here, OUTSIDE[version], "/secret", 403))
            eventually(partial(_says, place.here, OUTSIDE[version], "/public/1", 200))
            assert _seen(place, version) == (200, own)


def test_a_server_outside_sees_the_node_where_pods_are_masqueraded(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    settings = (DUAL, "--enable-ipv4-masquerade=true", "--enable-ipv6-masquerade=true")
    with shop(node, tmp_path, *settings) as place, node.open_outside() as outside, answering(outside):
        place.rule(of_entities(policy(PUBLIC, direction="egress"), "world"))
        for version in (4, 6):
            eventually(partial(_says, place.here, OUTSIDE[version], "/secret", 403))
            eventually(partial(_says, place.here, OUTSIDE[version], "/public/1", 200))
            for _ in range(20):
                assert _seen(place, version) == (200, NODE[version])


def test_the_node_itself_sees_the_pod_that_asks(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with shop(node, tmp_path, DUAL) as place, node.open() as host, answering(host):
        place.rule(of_entities(policy(PUBLIC, direction="egress"), "host"))
        for version, own in ((4, place.client.ipv4), (6, place.client.ipv6)):
            eventually(partial(_says, place.here, NODE[version], "/secret", 403))
            eventually(partial(_says, place.here, NODE[version], "/public/1", 200))
            assert place.here.run(ask_http, NODE[version], "/public/1") == (200, own)
