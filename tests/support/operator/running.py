"""Starts operators at a fake API server, in this process."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.client import Client
from cells.operator import operator
from cells.operator.leader import LeaderHive, Leadership
from lifecycle import Hive, Sources
from lifecycle.testing import eventually
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.ports import free_port

POOL = {"cluster-pool-ipv4-cidr": "10.0.0.0/8"}
LEASE = {
    "leader-election-lease-duration": "30s",
    "leader-election-renew-deadline": "20s",
    "leader-election-retry-period": "50ms",
}
"""An election with a lease that is renewed often, and is not lost on a busy machine."""


def settings(values: Mapping[str, object], folder: Path) -> None:
    """Write settings as a mounted ConfigMap: a file for each, a list separated by blanks."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, value in values.items():
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        (folder / name).write_text(text)


class Operators:
    """Operators of one cluster."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self._kubeconfig = folder / "kubeconfig"
        self._config = folder / "cilium-config"

    def arguments(self, values: Mapping[str, object] | None = None, token: str = ADMIN_TOKEN) -> list[str]:
        """Return the flags of an operator of this cluster, which name its settings."""
        cluster = {"server": f"http://127.0.0.1:{self.server.port}"}
        user = {"token": token}
        context = {"cluster": "stand-in", "user": "admin", "namespace": "kube-system"}
        self._kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "current-context": "stand-in",
                    "clusters": [{"name": "stand-in", "cluster": cluster}],
                    "users": [{"name": "admin", "user": user}],
                    "contexts": [{"name": "stand-in", "context": context}],
                }
            )
        )
        settings(
            {
                "k8s-kubeconfig-path": self._kubeconfig,
                "k8s-namespace": "kube-system",
                "operator-api-serve-addr": f"127.0.0.1:{free_port()}",
                "operator-prometheus-serve-addr": f"127.0.0.1:{free_port()}",
                "operator-k8s-client-qps": 0,
                **LEASE,
                **(POOL if values is None else values),
            },
            self._config,
        )
        return [f"--config-dir={self._config}"]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Return a client with all rights."""
        access = Access(servers=(f"http://127.0.0.1:{self.server.port}",), token=ADMIN_TOKEN)
        made = connect(access, qps=0)
        try:
            yield made
        finally:
            await made.reset()

    def hive(self, values: Mapping[str, object] | None = None, token: str = ADMIN_TOKEN) -> Hive:
        """Return an operator's hive, which is not started."""
        return Hive(
            operator, settings=Sources(argv=self.arguments(values, token), unknown="ignore"), name="hive"
        )

    @asynccontextmanager
    async def running(
        self,
        values: Mapping[str, object] | None = None,
        *,
        leads: bool = True,
        token: str = ADMIN_TOKEN,
    ) -> AsyncIterator[Hive]:
        """Run an operator; by default wait until it works as the leader."""
        async with self.hive(values, token).started() as hive:
            if leads:
                await eventually(lambda: at_work(hive), 30)
            yield hive


def at_work(hive: Hive) -> bool:
    """Return whether all hooks of the leader's hive have started."""
    inner = hive.get(LeaderHive).current
    health = [one for one in hive.health.snapshot() if one.module == "operator.leader"]
    return bool(
        hive.get(Leadership).leads and inner is not None and health and health[0].message == "running"
    )
