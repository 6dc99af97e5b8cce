"""How fast nodes allocate shared identities through etcd: for new labels, one by one and many at once."""

from __future__ import annotations

import time
from pathlib import Path

import anyio

from tests.bench.stats import Figure, Sample
from tests.integration.kvstore.agreeing import agent
from tests.support.etcd import Etcd

IN_A_ROW, AT_ONCE = 100, 300


async def _agreed(etcd: Etcd, round_: int) -> tuple[float, float]:
    """Return the median for one in ms, and identities per second for many at once."""
    unlimited = f"etcd.address={etcd.url},etcd.qps=10000,etcd.maxInflight=100"
    async with agent(etcd, 1, **{"kvstore-opt": unlimited}) as identities:
        times = []
        for number in range(IN_A_ROW):
            began = time.perf_counter()
            await identities.acquire((f"k8s:app=row-{round_}-{number}",))
            times.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for number in range(AT_ONCE):
                tasks.start_soon(identities.acquire, (f"k8s:app=many-{round_}-{number}",))
        return sorted(times)[IN_A_ROW // 2], AT_ONCE / (time.perf_counter() - began)


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return both, a value a round; each round has an etcd of its own."""
    single, many = [], []
    for each in range(rounds):
        etcd = Etcd(folder / f"etcd-{each}")
        etcd.start()
        try:
            one, rate = anyio.run(_agreed, etcd, each)
        finally:
            etcd.kill()
        single.append(one)
        many.append(rate)
    return [
        Figure("an identity by etcd, one after another", "ms", Sample(tuple(single)), None),
        Figure("identities by etcd, 300 asked for at once", "1/s", Sample(tuple(many)), None),
    ]
