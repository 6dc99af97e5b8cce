"""A cluster and its operator, without an agent, through events and failures from a seed: a log of all of it.

``python -m tests.support.simulated_run FOLDER SEED EVENTS SIZE OPERATOR``; see simulated_server. The same
arguments print the same lines. It fails at the first thing that the operator does wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
from pathlib import Path

import msgspec

from lifecycle.testing import VirtualClock
from tests.support import virtual_time
from tests.support.simulated_server import TROUBLES, OperatedServer
from tests.support.simulation import Size


async def events(server: OperatedServer, chance: random.Random, count: int) -> None:
    """Execute this number of events, and a rest; yield a line for each. Raises AssertionError."""
    await server.do_begin()
    report(server, "begins", [])
    for _ in range(count):
        (trouble,) = chance.choices([*TROUBLES], [*TROUBLES.values()])
        await server.do_trouble(trouble, chance.random())
        happened = await server.do_step(chance.choice([1, 1, 1, 5]))
        await server.do_over(trouble)
        report(server, f"{trouble or 'well'}: {'; '.join(happened)}", await server.do_faults())
    report(server, "rests", await server.do_rest())


def report(server: OperatedServer, what: str, faults: list[str]) -> None:
    """Return a line of the log."""
    digest = hashlib.sha256(json.dumps(server.state(), sort_keys=True).encode()).hexdigest()[:12]
    sys.stdout.write(f"{server.now:.3f} {digest} {what}\n")
    sys.stdout.flush()
    assert not faults, f"after {what}:\n" + "\n".join(faults[:12])


async def run(folder: Path, seed: int, count: int, size: Size, operator: str) -> None:
    """Run the simulation on a port of its own."""
    with VirtualClock() as clock:
        virtual_time.follow(clock)
        server = OperatedServer(folder, seed, size, clock, slices=operator == "slices", port=0)
        await events(server, random.Random(seed), count)  # noqa: S311 - the same each time
        await server.close()


def main() -> None:
    """Run with the command line's arguments."""
    folder, seed, count, size, operator = sys.argv[1:]
    virtual_time.install()
    random.seed(seed)
    asyncio.run(run(Path(folder), int(seed), int(count), msgspec.json.decode(size, type=Size), operator))


if __name__ == "__main__":
    main()
