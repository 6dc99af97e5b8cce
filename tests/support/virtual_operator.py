"""An operator in the process of its API server, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lifecycle import Hive, HiveError
from lifecycle.testing import VirtualClock
from tests.support.apiserver import ApiServer, Fault, of_client
from tests.support.apiserver.faults import OPERATOR
from tests.support.operator.running import Operators, at_work

POOL = {
    "cluster-pool-ipv4-cidr": "10.128.0.0/9",
    "leader-election-lease-duration": "15s",
    "leader-election-renew-deadline": "10s",
    "leader-election-retry-period": "2s",
}
"""The election with Cilium's defaults: virtual time costs nothing."""


class VirtualOperator:
    """An operator that its cluster starts, stops and kills."""

    def __init__(self, server: ApiServer, folder: Path, clock: VirtualClock, *, slices: bool) -> None:
        folder.mkdir()
        self._operators = Operators(server, folder)
        self._server, self._clock = server, clock
        self._values = POOL | {"enable-cilium-endpoint-slice": str(slices).lower()}
        self._task: asyncio.Task[None] | None = None
        self._hive: Hive | None = None
        self._stopping = asyncio.Event()

    @property
    def leads(self) -> bool:
        """Return whether it is the leader. Raises the error that ended it."""
        if self._task is not None and self._task.done():
            self._task.result()
        return self._hive is not None and at_work(self._hive)

    async def start(self) -> None:
        """Start it, and let time pass until it leads. Raises AssertionError."""
        self._stopping.clear()
        self._task = asyncio.create_task(self._run())
        await self._clock.until(lambda: self.leads, 120)

    async def stop(self) -> None:
        """Stop it cleanly: it releases its lease."""
        self._stopping.set()
        assert self._task is not None
        task = self._task
        await self._clock.until(task.done, 120)
        task.result()
        self._task = self._hive = None

    async def kill(self) -> None:
        """End it without another write: its lease expires."""
        fault = self._server.faults.add(Fault(of_client(OPERATOR), times=-1, close=True))
        await self._server.hang_up()
        await self.stop()
        fault.times = 0

    async def _run(self) -> None:
        """Restart it as a kubelet does: an operator ends when it loses its lease."""
        while not self._stopping.is_set():
            try:
                async with self._operators.hive(self._values).started() as self._hive:
                    await self._stopping.wait()
            except HiveError as error:
                if "leader election lost" not in str(error):
                    raise
                self._hive = None
