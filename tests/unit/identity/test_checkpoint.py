"""Local identity numbers survive a restart, and are not reused meanwhile."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import structlog

from cells.cluster.identity import FILE, cell, read_checkpoint
from cells.cluster.identity.identities import Identities
from cells.config import AgentConfig, AgentSettings
from lifecycle import Hive, Lifecycle, invoke, supply
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


def prefix(text: str) -> tuple[str, ...]:
    return (f"cidr:{text}", "reserved:world")


A, B, C = prefix("192.0.2.0/24"), prefix("198.51.100.0/24"), prefix("203.0.113.0/24")


def agent(folder: Path) -> Hive:
    known = AgentConfig(AgentSettings(state_dir=folder), Lifecycle("test"), structlog.get_logger())

    def needed(_: Identities) -> None: ...

    return Hive(cell, supply(known), invoke(needed))


async def test_restored_numbers_stay_with_their_labels(tmp_path: Path) -> None:
    async with agent(tmp_path).started() as hive:
        identities = hive.get(Identities)
        numbers = {labels: (await identities.acquire(labels)).id for labels in (A, B, C)}
        identities.release(numbers[B])
    async with agent(tmp_path).started() as hive:
        identities = hive.get(Identities)
        assert (await identities.acquire(C)).id == numbers[C]
        fresh = (await identities.acquire(prefix("10.0.0.0/8"))).id
        assert fresh not in numbers.values()
        assert (await identities.acquire(A, previous=fresh)).id == numbers[A]
    async with agent(tmp_path).started() as hive:
        identities = hive.get(Identities)
        identities.forget_restored()
        assert (await identities.acquire(B)).id not in {*numbers.values(), fresh}, "they are reused late"


async def test_labelled_nodes_keep_their_numbers_in_whatever_order_they_come(tmp_path: Path) -> None:
    nodes = [(f"k8s:zone={zone}", "reserved:remote-node") for zone in "abc"]
    async with agent(tmp_path).started() as hive:
        numbers = {labels: (await hive.get(Identities).acquire(labels)).id for labels in nodes}
    async with agent(tmp_path).started() as hive:
        identities = hive.get(Identities)
        assert {one: (await identities.acquire(one)).id for one in reversed(nodes)} == numbers


async def test_identities_of_missing_pods_survive_another_restart(tmp_path: Path) -> None:
    async with agent(tmp_path).started() as hive:
        number = (await hive.get(Identities).acquire(A)).id
    async with agent(tmp_path).started() as hive:
        await hive.get(Identities).acquire(B)
    async with agent(tmp_path).started() as hive:
        assert (await hive.get(Identities).acquire(A)).id == number


async def test_changes_are_written_soon_in_the_form_of_cilium(tmp_path: Path) -> None:
    path = tmp_path / "state" / FILE
    async with agent(tmp_path).started() as hive:
        number = (await hive.get(Identities).acquire(A)).id
        await hive.get(Identities).acquire(("k8s:app=web",))
        await eventually(path.exists)
        label = {"key": "192.0.2.0/24", "value": "", "source": "cidr"}
        world = {"key": "world", "value": "", "source": "reserved"}
        wanted = [{"id": number, "labels": {"192.0.2.0/24": label, "world": world}}]
        assert json.loads(path.read_bytes()) == wanted
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[{}]", "7", "[" * 100_000,
        '[{"id": 300, "labels": {"a": {"key": "a", "source": "k8s"}}}]',
        '[{"id": 16777217, "labels": {"a": {"key": "a", "source": "k8s"}}}]',
        '[{"id": -1, "labels": {}}]',
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_an_unusable_checkpoint_restores_no_numbers(tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    assert read_checkpoint(path, structlog.get_logger()) == {}
