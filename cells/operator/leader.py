"""Leader election: one operator holds the lease and works, the others wait for it.

The leader's cells are an inner hive, which is started with leadership and stopped before the lease is
released.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from typing import Final

from cells.kubernetes.leases import Election
from cells.operator.api_server import ClusterAPI
from cells.operator.options import ServedCluster
from lifecycle import (
    Duration,
    Health,
    HiveError,
    InnerHive,
    Jobs,
    Logger,
    Settings,
    after,
    config,
    invoke,
    module,
    provide,
    seconds,
)

__all__ = ["LeaderHive", "LeaderSettings", "Leadership", "cell"]


# Runs the leader's hive while the lease is held.
#
# Source: k8s.io/client-go/tools/leaderelection; as in Cilium 1.17, an operator that loses its lease exits.

LEASE: Final = "cilium-operator-resource-lock"
LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""The alphabet of Kubernetes' random names."""


class LeaderSettings(Settings, frozen=True):
    """Settings of the election."""

    leader_election_lease_duration: Duration = seconds(15)
    """How long other operators wait for a leader that does not renew its lease."""

    leader_election_renew_deadline: Duration = seconds(10)
    """How long a leader continues without renewing its lease."""

    leader_election_retry_period: Duration = seconds(2)
    """Interval of attempts to acquire or renew the lease."""

    def faults(self) -> Iterator[str]:
        lease, renew, retry = (
            self.leader_election_lease_duration,
            self.leader_election_renew_deadline,
            self.leader_election_retry_period,
        )
        if retry <= 0:
            yield f"leader-election-retry-period={retry}: expected more than 0"
        if lease < 1:
            yield f"leader-election-lease-duration={lease}: expected at least 1s"
        if lease <= renew:
            yield (
                f"leader-election-lease-duration={lease}: expected more than"
                f" leader-election-renew-deadline={renew}"
            )
        if renew <= 1.2 * retry:
            yield (
                f"leader-election-renew-deadline={renew}: expected more than 1.2 times"
                f" leader-election-retry-period={retry}"
            )


class LeaderHive(InnerHive):
    """The hive of the cells that run only on the leader."""


def _unwrapped(error: Exception) -> Exception:
    """Unwrap groups of a single exception."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class Leadership:
    """Takes part in the election and runs the leader's hive."""

    def __init__(
        self,
        hive: LeaderHive,
        server: ClusterAPI,
        cluster: ServedCluster,
        settings: LeaderSettings,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._hive = hive
        self._server = server
        self._namespace = cluster.namespace
        self._settings = settings
        self._health = health
        self._log = log
        self._election: Election | None = None
        self.identity = f"{socket.gethostname()}-{''.join(secrets.choice(LETTERS) for _ in range(10))}"
        """This operator's holderIdentity in the lease."""
        self.leads = False
        """Whether the leader's hive runs here."""
        jobs.one_shot("lead", self._run_election, fatal=True)

    @property
    def leader(self) -> str:
        """The last known holder of the lease; empty for none."""
        return self._election.leader if self._election is not None else ""

    async def _run_election(self) -> None:
        settings = self._settings
        self._election = Election(
            self._server.client,
            LEASE,
            self._namespace,
            self.identity,
            self._log,
            duration=settings.leader_election_lease_duration,
            deadline=settings.leader_election_renew_deadline,
            retry=settings.leader_election_retry_period,
        )
        self._health.ok("waiting for the lease")
        try:
            await self._election.run(self._work)
        except ExceptionGroup as group:
            raise _unwrapped(group) from group
        raise HiveError(f"leader election lost: {self.leader or 'no instance'} holds the lease {LEASE}")

    async def _work(self) -> None:
        self.leads = True
        self._health.ok("leader")
        try:
            await self._hive.run()
        finally:
            self.leads = False


@after(Leadership)
def lead() -> None:
    """Take part in the election."""


cell = module(
    "election",
    "Election of the leader",
    config(LeaderSettings),
    provide(Leadership),
    invoke(lead),
)
