"""A simulated cluster behind a fake API server in a process of its own, with an operator.

It takes a command a line, as JSON, and answers each with a line. An operator is in the same process, in
virtual time, which stands still until a command lets it pass. Agents are other processes, in real time: they
wait for the kernel, which has clocks of its own.

``python -m tests.support.simulated_server FOLDER SEED SIZE OPERATOR``; OPERATOR is ``endpoints`` or
``slices``, what it has agents read, or ``process`` for one that is started by others.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.testing import VirtualClock
from lifecycle.testing import eventually as happens
from tests.support import simulated_objects, virtual_time
from tests.support.apiserver import ApiServer, Fault, of_client
from tests.support.apiserver.errors import Resource
from tests.support.apiserver.faults import AGENT, OPERATOR
from tests.support.operated_simulation import REST, OperatedSimulation
from tests.support.simulation import Machine, Size
from tests.unit.apiserver.replay import RECORDINGS
from tests.unit.kubernetes.cluster import Cluster, kubeconfig, namespace, pod

PORT = 8001
SLICES = Resource("cilium.io", "ciliumendpointslices")
NODE = "node1"
CRDS = ("ciliumendpoints", "ciliumidentities", "ciliumnetworkpolicies", "ciliumnodes")
OF_THE_SERVER = {"10.96.0.1:443": ["192.0.2.10:6443"]}
"""Frontends of services that an API server creates for itself."""
PAUSE = 10.0
"""Virtual seconds after an event: slices are written at a limited rate."""
ERRORS = (500, 503, 429)
"""Answers to requests that fail."""
TROUBLES = {
    "": 12,
    "break": 2,
    "compact": 1,
    "errors": 2,
    "away": 1,
    f"cut {AGENT}": 1,
    f"cut {OPERATOR}": 1,
    "kill operator": 1,
    "time": 1,
}
"""Failures beside an event, and how often they happen."""
LONGEST = 900.0
"""Maximum duration of a failure in virtual seconds."""
AFTERWARDS = 120.0
"""Virtual seconds in which an operator catches up after a failure."""
Model = dict[str, Any]
"""Prefixes, frontends and what the node's pods allow, with keys and values in JSON form."""


class SimulatedServer:
    """The cluster and the API server that has its objects; commands change both."""

    def __init__(
        self, folder: Path, seed: int, size: Size, now: Callable[[], float], port: int = PORT
    ) -> None:
        self._server = ApiServer()
        self._server.crd_delay = 0
        self._objects = Cluster(self._server, "")
        self._size, self._folder, self._port = size, folder, port
        self._serving = AsyncExitStack()
        self._simulation = OperatedSimulation(
            seed, size, self._objects.put, self._objects.delete, get=self._objects.get, now=now
        )

    async def serve_commands(self) -> None:
        """Execute commands until standard input ends."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            command, *given = json.loads(line)
            answer = await getattr(self, f"do_{command}")(*given)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        await self.close()

    async def close(self) -> None:
        """Stop serving."""
        await self._serving.aclose()

    def _put_own(self) -> None:
        """Add the agent's node, with its pods."""
        self._objects.put(namespace("default"))
        self._objects.put(simulated_objects.node(NODE))
        self._objects.put({**simulated_objects.cilium_node(Machine(NODE, "192.0.2.9")), "spec": {}})
        for name in self._size.local:
            self._objects.put(pod(name, NODE, app=name))

    def _kubeconfig(self) -> str:
        return kubeconfig(self._folder, f"http://127.0.0.1:{self._server.port}")

    async def do_take(self, identities: list[int]) -> None:
        """Reserve identities that others have allocated."""
        self._simulation.taken.update(identities)

    async def do_step(self, count: int) -> list[str]:
        """Execute events one after the other and describe them."""
        return [self._simulation.step() for _ in range(count)]

    async def do_break(self) -> None:
        """Close all connections."""
        await self._server.hang_up()

    async def do_errors(self, count: int) -> None:
        """Fail the next requests, watches included."""
        for number in range(count):
            status = ERRORS[number % len(ERRORS)]
            self._server.faults.add(Fault(status=status, headers={"Retry-After": "1"}))

    async def do_cut(self, client: str) -> None:
        """Let this client reach no API server until do_mend()."""
        self._server.faults.add(Fault(of_client(client), times=-1, close=True))
        await self._server.hang_up()

    async def do_mend(self) -> None:
        """Answer all requests again."""
        self._server.faults.clear()

    async def do_away(self) -> None:
        """Stop serving."""
        await self._serving.aclose()

    async def do_back(self) -> None:
        """Serve after a restart without history."""
        self._server.restart()
        await self._serving.enter_async_context(self._server.serving(port=self._port))
        self._port = self._server.port

    async def do_compact(self) -> None:
        """Drop the history and close all connections: watchers must list again."""
        self._server.store.compact()
        await self._server.hang_up()

    async def do_model(self) -> Model:
        """Return what the node's maps should hold now."""
        simulation = self._simulation
        simulation.look()
        return {
            "prefixes": simulation.prefixes(),
            "frontends": OF_THE_SERVER
            | {frontend: sorted(backends) for frontend, backends in simulation.frontends().items()},
            "allowed": {name: sorted(one) for name, one in simulation.allowed().items()},
        }


class OperatedServer(SimulatedServer):
    """The same with an operator, in virtual time."""

    def __init__(
        self, folder: Path, seed: int, size: Size, clock: VirtualClock, *, slices: bool, port: int = PORT
    ) -> None:
        super().__init__(folder, seed, size, lambda: clock.now, port)
        from tests.support.virtual_operator import VirtualOperator  # once clocks are virtual

        self._clock, self._slices = clock, slices
        self._operator = VirtualOperator(self._server, folder / "operator", clock, slices=slices)

    async def do_begin(self) -> str:
        """Let the operator create definitions and, before pods run, nodes' ranges; return a kubeconfig."""
        await self.do_back()
        await self._operator.start()
        self._put_own()
        self._simulation.found()
        await self._clock.until(self._all_ranged)
        self._simulation.fill()
        gc.freeze()
        await self._clock.advance(PAUSE)
        await self._clock.until(self._all_sliced)
        return self._kubeconfig()

    def _all_ranged(self) -> bool:
        self._simulation.look()
        return self._simulation.ranged

    def _all_sliced(self) -> bool:
        """Return whether slices, if there are any, have all endpoints: writes are rate-limited."""
        slices = self._server.store.of(SLICES).objects.values()
        return not self._slices or sum(len(one["endpoints"]) for one in slices) >= self._size.pods

    async def close(self) -> None:
        """Stop the operator and serving."""
        await self._operator.stop()
        await super().close()

    @property
    def now(self) -> float:
        """The cluster's clock, in seconds."""
        return self._clock.now

    def state(self) -> Model:
        """Return the objects that an operator creates, changes and deletes."""
        return self._simulation.state()

    async def do_step(self, count: int) -> list[str]:
        """Execute events, each with its time."""
        found = []
        for _ in range(count):
            found.append(self._simulation.step())
            await self._clock.advance(PAUSE)
        return found

    async def do_trouble(self, trouble: str, share: float) -> None:
        """Start a failure, and let this share of its maximum duration pass."""
        match trouble.split():
            case ["break"]:
                await self.do_break()
            case ["compact"]:
                await self.do_compact()
            case ["errors"]:
                await self.do_errors(1 + int(30 * share))
            case ["away"]:
                await self.do_away()
            case ["cut", client]:
                await self.do_cut(client)
            case ["kill", "operator"]:
                await self._operator.kill()
        if trouble:
            await self._clock.advance(LONGEST * share)

    async def do_over(self, trouble: str) -> None:
        """End the failure."""
        match trouble.split():
            case ["away"]:
                await self.do_back()
            case ["cut", _]:
                await self.do_mend()
            case ["kill", "operator"]:
                await self._operator.start()
        if trouble:
            await self._clock.advance(AFTERWARDS)
        assert self._operator.leads, f"{AFTERWARDS} s after {trouble!r}"

    async def do_rest(self) -> list[str]:
        """Let time pass until all unneeded objects are deleted; return what the operator did wrong."""
        await self._clock.advance(REST)
        self._simulation.look()
        return [*self._simulation.faults(rested=True)]

    async def do_faults(self) -> list[str]:
        """Return what the operator did wrong so far."""
        self._simulation.look()
        return [*self._simulation.faults()]


class MeasuredServer(SimulatedServer):
    """The same for an operator in a process of its own, in real time."""

    async def do_begin(self) -> str:
        """Create nodes without ranges, and no pods; return the kubeconfig."""
        for one in CRDS:
            self._server.add(json.loads((RECORDINGS / "fixtures" / f"crd_{one}.json").read_bytes()))
        await self.do_back()
        await happens(lambda: all(self._objects.serves(one) for one in CRDS))
        self._server.definitions.fresh.clear()
        self._put_own()
        self._simulation.found()
        gc.freeze()
        return self._kubeconfig()

    async def do_ranged(self) -> bool:
        """Return whether every node has its range."""
        self._simulation.look()
        return self._simulation.ranged

    async def do_fill(self) -> None:
        """Create pods, services and policies."""
        self._simulation.fill()
        gc.freeze()


async def serve(folder: Path, seed: int, size: Size, operator: str) -> None:
    """Execute commands until standard input ends."""
    if operator == "process":
        now = asyncio.get_running_loop().time
        await MeasuredServer(folder, seed, size, now).serve_commands()
        return
    with VirtualClock() as clock:
        virtual_time.follow(clock)
        await OperatedServer(folder, seed, size, clock, slices=operator == "slices").serve_commands()


def main() -> None:
    """Serve with the command line's arguments."""
    folder, seed, size, operator = sys.argv[1:]
    if operator != "process":
        virtual_time.install()
        random.seed(seed)
    asyncio.run(serve(Path(folder), int(seed), msgspec.json.decode(size, type=Size), operator))


if __name__ == "__main__":
    main()
