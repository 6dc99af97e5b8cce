"""HTTP rules without Envoy, or with a lagging one: traffic is denied, and the reason is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.control import HTTPProxyPorts, HTTPProxyState, PolicyView
from cells.policy.explain import End, Target, explained
from cells.policy.labels import LabelSet
from cells.policy.rules import Direction
from lifecycle import HealthTree, Table, provide
from lifecycle.testing import eventually
from tests.unit.policy.room import FRONTEND, HOST, Room, room
from tests.unit.policy.room import PORT as DNS_PORT

pytestmark = pytest.mark.anyio

POLICY = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: requests, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  ingress:
    - fromEndpoints: [{matchLabels: {app: frontend}}]
      toPorts: [{ports: [{port: "8080", protocol: TCP}], rules: {http: [{method: GET}]}}]
"""
OPEN = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: open, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  ingress: [{fromEndpoints: [{matchLabels: {app: frontend}}]}]
"""
PROXY_PORT = 12345


class Ports:
    """HTTPProxyPorts of a node with an Envoy."""

    serves = True

    @staticmethod
    def port(name: str) -> int:
        """One for all."""
        del name
        return PROXY_PORT


def proxy_ports() -> HTTPProxyPorts:
    return Ports()


def degraded(node: Room) -> list[str]:
    return [one.message for one in node.hive.get(HealthTree).snapshot() if one.level == "degraded"]


def unenforced(node: Room) -> dict[str, str]:
    return {one.name: one.unenforced for one in node.objects.all()}


async def test_without_envoy_what_http_rules_select_is_closed_whatever_others_allow(
    tmp_path: Path,
) -> None:
    async with room(tmp_path, proxy=DNS_PORT) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        web = PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16)
        whole = PolicyKey(frontend.id, egress=False)
        node.write(POLICY)
        node.write(OPEN, "open.yaml")
        await eventually(lambda: {web, whole, HOST} <= node.entries.keys())
        assert node.entries[web] == PolicyEntry(deny=True)
        assert node.entries[whole] == PolicyEntry()
        rows = {one.name: one for one in node.objects.all()}
        assert rows["requests"].valid, "in force, and not what its name said before"
        assert rows["requests"].unenforced.startswith("there is no Envoy on this node: connections that")
        assert rows["open"].unenforced == ""
        (health,) = degraded(node)
        assert health.startswith("CiliumNetworkPolicy shop/requests: there is no Envoy on this node")
        view = PolicyView(node.policy, None)

        def policy_of(direction: Direction) -> DirectionPolicy:
            found = view.policy(node.cart, direction)
            assert found is not None
            return found

        client = End("frontend", frontend.id, LabelSet.parse(FRONTEND))
        server = End("cart", 1, LabelSet.parse(()), policy=policy_of, no_http_proxy=view.no_http_proxy)
        answer = explained(client, "cart", [Target(server, 6, 8080)], lambda origin: origin.text)
        assert answer.verdict == "denied"
        (near,) = answer.ways[0].directions[0].near
        assert near.rule == "spec.ingress[0] of CiliumNetworkPolicy shop/requests"
        assert near.missing == rows["requests"].unenforced
        assert view.decide(node.cart, "ingress", frontend.id, 6, 8080, address=None).verdict == "drop"
        assert view.decide(node.cart, "ingress", frontend.id, 6, 81, address=None).verdict == "allow"
        (node.folder / "policy.yaml").unlink()
        await eventually(lambda: web not in node.entries)
        await eventually(lambda: degraded(node) == [])


async def test_rules_say_so_while_envoy_does_not_follow_them(tmp_path: Path) -> None:
    async with room(tmp_path, None, provide(proxy_ports), proxy=DNS_PORT) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        web = PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16)
        node.write(POLICY)
        await eventually(lambda: web in node.entries)
        assert node.entries[web] == PolicyEntry(proxy_port=PROXY_PORT, only_by_proxy=True)
        await eventually(lambda: unenforced(node) == {"requests": ""})
        view = PolicyView(node.policy, None)

        def verdict() -> str:
            return view.decide(node.cart, "ingress", frontend.id, 6, 8080, address=None).verdict

        proxies = node.hive.get(Table[str, HTTPProxyState])
        for state, expected in (
            (HTTPProxyState(runs=False, message="Envoy does not run"), "drop"),
            (HTTPProxyState(runs=True, message="Envoy has not accepted the rules"), "redirect"),
            (HTTPProxyState(runs=True), "redirect"),
        ):
            with proxies.txn() as rows:
                rows.put(state)
            message = state.message
            await eventually(lambda wanted=message: unenforced(node) == {"requests": wanted})  # type: ignore[misc]
            assert verdict() == expected
            messages = [one.rpartition(": ")[2] for one in degraded(node)]
            assert messages == ([message] if message else [])
