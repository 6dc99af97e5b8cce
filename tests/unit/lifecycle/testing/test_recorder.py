"""The recorder: what came before what, whatever order siblings take."""

import anyio
import pytest

from lifecycle import Hook, Lifecycle, invoke, module, provide
from lifecycle.testing import Recorder

pytestmark = pytest.mark.anyio


class Disk:
    def __init__(self, lifecycle: Lifecycle) -> None:
        register(lifecycle, "mount")


class Index:
    def __init__(self, disk: Disk, lifecycle: Lifecycle) -> None:
        register(lifecycle, "index")


class Mirror:
    def __init__(self, disk: Disk, lifecycle: Lifecycle) -> None:
        register(lifecycle, "mirror")


class Server:
    def __init__(self, index: Index, mirror: Mirror, lifecycle: Lifecycle) -> None:
        register(lifecycle, "serve")


def register(lifecycle: Lifecycle, name: str) -> None:
    lifecycle.append(Hook(name, anyio.lowlevel.checkpoint, anyio.lowlevel.checkpoint))


storage = module("storage", "Storage", provide(Disk, Index, Mirror))
server = module("server", "Server", provide(Server), invoke(Server))


@pytest.mark.parametrize("seed", range(5))
async def test_the_order_of_the_graph_holds_under_every_seed(seed: int) -> None:
    recorder = Recorder(seed)
    async with recorder.started(storage, server):
        recorder.mark("ready")
    recorder.assert_before(("mount", "index"), (Disk, Mirror), ("storage", Server), ("serve", "ready"))
    recorder.assert_clean()


async def test_siblings_take_another_order_with_another_seed() -> None:
    orders = set()
    for seed in range(8):
        recorder = Recorder(seed)
        async with recorder.started(storage, server):
            pass
        orders.add(tuple(recorder.order()))
    assert orders == {("mount", "index", "mirror", "serve"), ("mount", "mirror", "index", "serve")}


async def test_the_same_seed_is_the_same_order() -> None:
    orders = set()
    for _ in range(3):
        recorder = Recorder(7)
        async with recorder.started(storage, server):
            pass
        orders.add((*recorder.order(), *recorder.order("stopped")))
    assert len(orders) == 1


async def test_some_seed_finds_an_order_that_works_by_chance() -> None:
    messages = []
    for seed in range(8):
        recorder = Recorder(seed)
        async with recorder.started(storage, server):
            pass
        if recorder.order().index("mirror") < recorder.order().index("index"):
            with pytest.raises(AssertionError) as caught:
                recorder.assert_before(("index", "mirror"))
            messages.append(str(caught.value))
    assert 0 < len(messages) < 8
    assert "'index' before 'mirror': start 'mirror' (storage) came before start" in messages[0]


async def test_an_unknown_hook_name_is_reported_with_the_known_ones() -> None:
    recorder = Recorder()
    async with recorder.started(storage, server):
        pass
    with pytest.raises(AssertionError, match="'umount' never started; what did: mount, "):
        recorder.assert_before(("mount", "umount"))


async def test_a_wrong_stop_order_is_reported() -> None:
    recorder = Recorder()
    async with recorder.started(storage, server):
        pass
    recorder.events.reverse()
    with pytest.raises(
        AssertionError, match=r"hook 'mount' \(storage\) stopped before hook 'index' \(storage\)"
    ):
        recorder.assert_clean()
