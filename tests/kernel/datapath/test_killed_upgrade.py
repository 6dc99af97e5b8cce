"""An upgrade killed between any two steps: traffic continues, and the next start completes it."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells.datapath import trial
from cells.datapath.libbpf import LoadedObject
from cells.maps import bpf
from cells.maps import map as maps_map
from cells.maps.map import Map
from cells.maps.records.endpoints import PolicyKey
from cells.netlink.links import HostLinks
from hive.lab.children import Child, ChildDiedError
from tests.kernel.datapath.node import LivePod, running
from tests.kernel.datapath.traffic import flow, lost
from tests.support.compiled import another_build
from tests.support.namespaces import in_node
from tests.support.pairwise import commit
from tests.support.points import EVERY
from tests.support.waiting import eventually

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

BPFFS = Path("/sys/fs/bpf")
STEPS_AT_LEAST = 20
APART = 1 if EVERY else 24
"""Steps from one kill to the next: every load is verified by the kernel, which takes most of the time."""
FIRST = int(commit()[:12] or "0", 16) % APART
"""The first kill, of another step for another commit: in time all have their turn."""
BATCHES = {maps_map.MAP_UPDATE_BATCH, maps_map.MAP_DELETE_BATCH}


class Steps:
    """Counts what a start does to the kernel and its pins, and ends the process right before one of them."""

    def __init__(self, last: int) -> None:
        self.done = 0
        self._last = last
        self._muted = False

    def step(self, *_: object) -> None:
        if self._muted:
            return
        if self.done == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.done += 1

    def interpose(self) -> None:
        """For the rest of this process."""
        for owner, name in (
            (Map, "update"),
            (Map, "delete"),
            (LoadedObject, "load"),
            (HostLinks, "attach_clsact"),
        ):
            setattr(owner, name, self._before(getattr(owner, name)))
        for module, numbers in ((bpf, {bpf.OBJ_PIN}), (maps_map, BATCHES)):
            module.command = self._before(module.command, lambda number, *_, n=numbers: number in n)  # type: ignore[attr-defined]
        trial.self_check = self._quietly(trial.self_check)
        sys.addaudithook(self._heard)

    def _before(self, function: Callable[..., Any], when: Callable[..., bool] | None = None) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if when is None or when(*args):
                self.step()
            return function(*args, **kwargs)

        return call

    def _quietly(self, function: Callable[..., Any]) -> Any:
        """It only touches maps of its own."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._muted = True
            try:
                return function(*args, **kwargs)
            finally:
                self._muted = False

        return call

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event in {"os.rename", "os.remove"} and str(args[0]).startswith(str(BPFFS)):
            self.step()


def upgrade(last: int, settings: dict[str, object]) -> int:
    """Start and stop in this process; how many steps it took."""
    steps = Steps(last)
    steps.interpose()

    async def start() -> None:
        async with running(**settings):
            pass

    anyio.run(start)
    return steps.done


async def prepare() -> tuple[LivePod, LivePod]:
    """A node of which one pod may only answer."""
    async with running() as node:
        node.add_host()
        one, two = node.add_pod(10), node.add_pod(11)
        one.policy.delete(PolicyKey(0, True).pack())
        return one, two


def finish(settings: dict[str, object]) -> None:
    """A start that is left alone: its programs are in force, and nothing of those before is left."""

    async def start() -> None:
        async with running(**settings) as node:
            ours = {number for name, number in node.datapath.programs.items() if name.startswith("hive_")}
            entered = {int.from_bytes(value, "little") for _, value in node.maps.entry.items()} - {0}
            assert entered == ours

    anyio.run(start)
    assert [path.name for path in BPFFS.glob("**/*") if "_former_" in path.name or "_new" in path.name] == []


@pytest.fixture(scope="module")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another build of the same source."""
    return another_build(tmp_path_factory.mktemp("other"))


@pytest.mark.timeout(3600 if EVERY else 600)  # a dozen starts; two for every step in a soak
def test_a_start_may_be_killed_between_any_two_steps(in_node: None, other_build: Path) -> None:
    one, two = anyio.run(prepare)
    variants: list[dict[str, object]] = [
        {"datapath_object": other_build, "bpf_ct_global_any_max": 8192},
        {},
    ]
    killed, at, over = 0, FIRST, False
    with flow(one, two, answer=True) as answers, flow(None, two) as down:
        eventually(lambda: len(answers[1]) > 100 and len(down[1]) > 100)
        while not over:
            settings = variants[killed % 2]
            for pin in (BPFFS / "cilium/dispatch").iterdir():
                pin.unlink()  # so that the programs on the interfaces are replaced as well
            try:
                Child(lambda _, last=at, given=settings: upgrade(last, given)).result(60)
                over = True
            except ChildDiedError:
                killed += 1
                at += APART
            finish(settings)
        so_far = len(answers[0])
        eventually(lambda: len(answers[0]) > so_far + 100)
    assert at >= STEPS_AT_LEAST
    assert (lost(answers), lost(down)) == (set(), set())
