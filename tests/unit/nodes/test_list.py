"""The nodes as the API tells them, to those who ask once and those who ask again."""

from __future__ import annotations

from ipaddress import ip_address

from msgspec.structs import replace

from cells.api.operations.node_view import CLIENT_SECONDS, NodeWatchers, node_element
from cells.cluster.nodes.node import ClusterNode
from tests.unit.remote_nodes.test_claims import node


def names(found: object) -> list[str]:
    return [one.name for one in found] if isinstance(found, list) else []


def ask(
    watchers: NodeWatchers, number: int, *nodes: ClusterNode, at: float = 0.0
) -> tuple[int, list[str], list[str]]:
    answer = watchers.answer("default/n1", number, map(node_element, nodes), at)
    return answer.client_id, names(answer.nodes_added), names(answer.nodes_removed)


ONE, TWO = node(1, "10.1.0.0/24"), node(2, "10.2.0.0/24", "fd02::/112")


def test_who_asks_again_is_told_what_has_changed() -> None:
    watchers = NodeWatchers()
    number, added, removed = ask(watchers, 0, ONE, TWO)
    assert (added, removed) == (["default/n1", "default/n2"], [])
    assert ask(watchers, number, ONE, TWO) == (number, [], [])
    moved = replace(TWO, ipv4_alloc_cidrs=ONE.ipv4_alloc_cidrs)
    assert ask(watchers, number, ONE, moved) == (number, ["default/n2"], ["default/n2"])
    assert ask(watchers, number, ONE) == (number, [], ["default/n2"])


def test_who_has_not_asked_for_long_is_told_all() -> None:
    watchers = NodeWatchers()
    number, _, _ = ask(watchers, 0, ONE)
    again, added, _ = ask(watchers, number, ONE, at=CLIENT_SECONDS + 1)
    assert again != number
    assert added == ["default/n1"]


def test_a_node_with_its_addresses() -> None:
    element = node_element(replace(TWO, health=(ip_address("10.2.0.9"),)))
    assert element.primary_address is not None
    assert element.primary_address.ipv4 is not None
    assert element.primary_address.ipv6 is not None
    assert (element.primary_address.ipv4.ip, element.primary_address.ipv4.alloc_range) == (
        "192.0.2.2",
        "10.2.0.0/24",
    )
    assert element.primary_address.ipv6.alloc_range == "fd02::/112"
    assert [(one.ip, one.address_type) for one in element.secondary_addresses or ()] == [
        ("10.2.0.1", "CiliumInternalIP")
    ]
    assert element.health_endpoint_address is not None
    assert element.health_endpoint_address.ipv4 is not None
    assert element.ingress_address is None
    assert element.source == "custom-resource"
