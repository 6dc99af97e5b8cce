"""Policies of a node with objects from a folder's files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import structlog

from cells import kubernetes
from cells.cluster import identity, ipcache
from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache.rows import IpcacheTarget
from cells.cluster.remote_endpoints import RemoteEndpoint
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes.resources import Resources
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy import control
from cells.policy import maps as policy_maps
from cells.policy.control import DNSProxyPort, NamedAddresses, PolicyObject, PolicyWatch, RulePolicy
from cells.policy.maps import EndpointPolicies, PolicyMapPool
from lifecycle import Cell, HealthStatus, Hive, Lifecycle, Table, invoke, provide, replace, supply
from tests.unit.ipcache.fakes import FakeIpcacheMap
from tests.unit.policy_maps.fakes import FakeMaps

CART = ("k8s:app=cart", "k8s:io.cilium.k8s.policy.cluster=default", "k8s:io.kubernetes.pod.namespace=shop")
FRONTEND = ("k8s:app=frontend", *CART[1:])
HOST = PolicyKey(1, egress=False)
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


@dataclass
class FixedPort:
    """A DNSProxyPort with a constant value."""

    port: int


class Room:
    """One endpoint, the cart, on a node with objects from a folder's files."""

    def __init__(self, hive: Hive, folder: Path, maps: FakeMaps, kernel: FakeIpcacheMap) -> None:
        self.hive, self.folder, self.maps, self.kernel = hive, folder, maps, kernel
        self.identities = hive.get(Identities)
        self.policies = hive.get(EndpointPolicies)
        self.policy = hive.get(RulePolicy)
        self.resources = hive.get(Resources)
        self.names = hive.get(NamedAddresses)
        self.watch = hive.get(PolicyWatch)
        self.objects = hive.get(Table[tuple[str, str, str], PolicyObject])
        self.remote = hive.get(Table[tuple[str, str], RemoteEndpoint])
        self._hive = hive
        self.regenerated: list[str] = []
        self.cart = self.policies.acquire()
        self._realize()

    def _realize(self) -> None:
        found = self.identities.acquire_now(CART)
        assert found is not None
        self.policies.realize(self.cart, found.id, CART, ("shop", "cart"))

    async def regenerate(self) -> None:
        """Regenerate endpoints as the agent does, until cancelled."""
        async for changes in self.policies.outdated.changes():
            for row in (change.row for change in changes if change.row is not None):
                self.regenerated.append(row.reason)
                self._realize()

    @property
    def entries(self) -> dict[PolicyKey, PolicyEntry]:
        return dict(self.maps.maps[self.cart])

    def health(self, part: str) -> list[HealthStatus]:
        """Return the health report of a part of the policy module."""
        return [one for one in self._hive.health.snapshot() if one.module.endswith(f".{part}")]

    def write(self, text: str, name: str = "policy.yaml") -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(self.folder / name)


@asynccontextmanager
async def room(
    folder: Path | str,
    settings: Mapping[str, object] | None = None,
    *more: Cell,
    ipv6: bool = False,
    proxy: int = 0,
) -> AsyncIterator[Room]:
    """Start the node; ``proxy`` is the port of a DNS proxy, or 0 without one."""
    maps, kernel = FakeMaps(room=64 if proxy else 9), FakeIpcacheMap()
    state = TemporaryDirectory(prefix="state-")
    agent = AgentSettings(enable_ipv6=ipv6, state_dir=Path(state.name))
    known = AgentConfig(agent, Lifecycle("test"), structlog.get_logger())

    def needed(
        _: EndpointPolicies,
        __: Identities,
        ___: Table[tuple[str, str, str], PolicyObject],
        ____: RulePolicy,
        _____: Resources,
    ) -> None: ...

    def remote_endpoints() -> Table[tuple[str, str], RemoteEndpoint]:
        return Table("remote-endpoints", key=lambda one: one.key)

    cells = (identity.cell, ipcache.cell, kubernetes.cell, policy_maps.cell, control.cell)

    def proxy_port() -> DNSProxyPort:
        return FixedPort(proxy)

    known_otherwise = (supply(known), provide(remote_endpoints), *([provide(proxy_port)] if proxy else []))
    fakes = (replace(PolicyMapPool, maps), replace(IpcacheTarget, kernel.target))
    hive = Hive(
        *cells,
        *known_otherwise,
        *fakes,
        invoke(EndpointPolicies, Identities),
        *more,
        settings=settings or {"manifests-dir": str(folder)},
    )
    with state:
        async with hive.started():
            found = Room(hive, Path(folder), maps, kernel)
            async with anyio.create_task_group() as group:
                group.start_soon(found.regenerate)
                yield found
                group.cancel_scope.cancel()


PORT = 10053
