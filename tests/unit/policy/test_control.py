"""Policies from a folder of manifests to policy maps and the ipcache, through the cells, over fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from cells import kubernetes
from cells.cluster import identity, ipcache
from cells.cluster.identity import INIT, INIT_LABELS, Identities
from cells.cluster.ipcache import IpcacheMap
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes import Resources
from cells.maps import PolicyEntry, PolicyKey
from cells.policy import control
from cells.policy import maps as policy_maps
from cells.policy.control import PolicyObject, RulePolicy
from cells.policy.maps import ALLOW_ALL, EndpointPolicies, PolicyMapPool
from lifecycle import Hive, Lifecycle, Table, invoke, replace, supply
from lifecycle.testing import eventually
from tests.unit.ipcache.fakes import FakeIpcacheMap
from tests.unit.policy_maps.test_endpoint_policies import FakeMaps

pytestmark = pytest.mark.anyio

CART = ("k8s:app=cart", "k8s:io.cilium.k8s.policy.cluster=default", "k8s:io.kubernetes.pod.namespace=shop")
FRONTEND = ("k8s:app=frontend", *CART[1:])
HOST = PolicyKey(1, egress=False)
EGRESS = PolicyKey(0, egress=True)
WEB = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cart, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  ingress:
    - fromEndpoints: [{matchLabels: {app: frontend}}]
      toPorts: [{ports: [{port: "8080", protocol: TCP}]}]
"""


class Room:
    """One endpoint, the cart, in a node whose objects are a folder's files."""

    def __init__(self, hive: Hive, folder: Path, maps: FakeMaps, kernel: FakeIpcacheMap) -> None:
        self.folder, self.maps, self.kernel = folder, maps, kernel
        self.identities = hive.get(Identities)
        self.policies = hive.get(EndpointPolicies)
        self.policy = hive.get(RulePolicy)
        self.resources = hive.get(Resources)
        self.objects = hive.get(Table[PolicyObject])
        self.policies.regenerate = self._regenerate
        self.cart = self.policies.acquire()
        self._realize()

    def _realize(self) -> None:
        found = self.identities.acquire_now(CART)
        assert found is not None
        self.policies.realize(self.cart, found.id, CART)

    def _regenerate(self, ids: object, reason: str) -> None:
        del ids, reason
        self._realize()

    @property
    def entries(self) -> dict[PolicyKey, PolicyEntry]:
        return dict(self.maps.maps[self.cart])

    def write(self, text: str, name: str = "policy.yaml") -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(self.folder / name)


@asynccontextmanager
async def room(folder: Path | str, settings: Mapping[str, object] | None = None) -> AsyncIterator[Room]:
    maps, kernel = FakeMaps(), FakeIpcacheMap()
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def needed(
        _: EndpointPolicies, __: Identities, ___: Table[PolicyObject], ____: RulePolicy, _____: Resources
    ) -> None: ...

    cells = (identity.cell, ipcache.cell, kubernetes.cell, policy_maps.cell, control.cell, supply(known))
    fakes = (replace(PolicyMapPool, maps), replace(IpcacheMap, kernel))
    hive = Hive(
        *cells,
        *fakes,
        invoke(EndpointPolicies, Identities),
        settings=settings or {"manifests-dir": str(folder)},
    )
    async with hive.started():
        yield Room(hive, Path(folder), maps, kernel)


async def test_an_endpoint_without_policies_may_do_everything(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        assert node.entries.keys() == {*ALLOW_ALL, HOST}


@pytest.mark.parametrize("source", [True, False])
async def test_a_pod_whose_labels_are_not_known_is_closed_where_somebody_will_tell_them(
    tmp_path: Path, source: bool
) -> None:
    async with room(tmp_path if source else "") as node:
        new = node.policies.acquire()
        node.policies.realize(new, INIT, INIT_LABELS)
        assert node.maps.maps[new].keys() == ({HOST} if source else {*ALLOW_ALL})


async def test_a_policy_is_in_the_map_once_its_file_is_there_and_gone_with_it(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        web = PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16)
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {web, HOST, EGRESS})
        assert node.policies.status(node.cart).ingress_enforced
        assert [one.valid for one in node.objects.all()] == [True]
        (node.folder / "policy.yaml").unlink()
        await eventually(lambda: node.entries.keys() == {*ALLOW_ALL, HOST})
        assert node.objects.all() == []


async def test_an_identity_that_comes_gets_its_entries_and_loses_them(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {HOST, EGRESS})
        frontend = node.identities.acquire_now(FRONTEND)
        assert frontend is not None
        web = PolicyKey(frontend.id, egress=False, protocol=6, port=8080, port_bits=16)
        await eventually(lambda: web in node.entries)
        node.identities.release(frontend.id)
        await eventually(lambda: web not in node.entries)


async def test_a_refused_policy_leaves_what_its_name_said_in_force(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB)
        await eventually(lambda: node.entries.keys() == {HOST, EGRESS})
        node.write(WEB.replace('"8080"', '"70000"'))
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        (refused,) = node.objects.all()
        assert "value out of range" in refused.message
        assert refused.path == "spec.ingress[0].toPorts[0].ports[0]"
        assert node.entries.keys() == {HOST, EGRESS}


async def test_what_needs_a_proxy_is_refused_by_name(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(
            WEB.replace("ingress:", "egress:").replace(
                "fromEndpoints: [{matchLabels: {app: frontend}}]", "toFQDNs: [{matchName: a.example}]"
            )
        )
        await eventually(lambda: [one.valid for one in node.objects.all()] == [False])
        assert "DNS proxy" in node.objects.all()[0].message


async def test_a_prefix_has_entries_before_packets_get_its_identity(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(WEB.replace("fromEndpoints: [{matchLabels: {app: frontend}}]", "fromCIDR: [192.0.2.0/24]"))
        await eventually(lambda: "192.0.2.0/24" in node.kernel.identities)
        number = node.kernel.identities["192.0.2.0/24"]
        assert PolicyKey(number, egress=False, protocol=6, port=8080, port_bits=16) in node.entries
        (node.folder / "policy.yaml").unlink()
        await eventually(lambda: node.entries.keys() == {*ALLOW_ALL, HOST})
        assert node.kernel.identities == {}


SERVICES = """
apiVersion: v1
kind: Service
metadata: {name: database, namespace: shop}
spec: {clusterIP: 10.96.0.9, ports: [{port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: database-1, namespace: shop, labels: {kubernetes.io/service-name: database}}
addressType: IPv4
endpoints: [{addresses: [192.0.2.7]}]
ports: [{port: 5432}]
"""
TO_SERVICES = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: to-database, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  egress: [{toServices: [{k8sService: {serviceName: database, namespace: shop}}]}]
"""


async def test_a_service_without_selector_is_its_backends_addresses_as_they_change(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        node.write(TO_SERVICES)
        await eventually(lambda: node.policies.status(node.cart).egress_enforced)
        assert EGRESS not in node.entries
        node.write(SERVICES, "services.yaml")
        await eventually(lambda: "192.0.2.7/32" in node.kernel.identities)
        assert PolicyKey(node.kernel.identities["192.0.2.7/32"], egress=True) in node.entries
        node.write(SERVICES.replace("192.0.2.7", "192.0.2.8"), "services.yaml")
        await eventually(lambda: "192.0.2.8/32" in node.kernel.identities)
        assert "192.0.2.7/32" not in node.kernel.identities
        revision = node.policy.revision
        other = SERVICES.replace("192.0.2.7", "192.0.2.9").replace("database", "other")
        node.write(other, "other.yaml")
        node.write(WEB)
        await eventually(lambda: [one.name for one in node.objects.all()] == ["cart"])
        assert node.policy.revision == revision + 2  # one policy less, one more, and nothing for services


async def test_a_policy_of_others_gives_its_revision_and_regenerates_nobody(tmp_path: Path) -> None:
    async with room(tmp_path) as node:
        regenerated: list[object] = []
        node.policies.regenerate = lambda ids, reason: regenerated.append((ids, reason))
        node.write(WEB.replace("{app: cart}", "{app: another}"))
        await eventually(lambda: node.policies.status(node.cart).revision == node.policy.revision == 2)
        assert regenerated == []
        assert node.entries.keys() == {*ALLOW_ALL, HOST}
