"""Events from an eBPF program to a subscriber, through the kernel's real buffers."""

import errno
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from cells import config, maps
from cells.datapath.build import compile_one, find_clang
from cells.datapath.libbpf import LoadedObject
from cells.maps.bpf import test_run as run_program
from cells.maps.map import map_by_id, possible_cpus
from cells.maps.node_maps import Maps
from cells.observe import events
from cells.observe.events import Drop, Event, Events, Lost, Raw, Subscription, decode, event_text
from cells.observe.events.reader import Ring
from lifecycle import Hive, invoke
from tests.support.processor import on_one_processor
from tests.support.waiting import eventually

pytestmark = [pytest.mark.kernel, pytest.mark.anyio, pytest.mark.usefixtures("in_node")]

DROPPED = struct.pack("<BBHIIHHIIIHBbI", 1, 133, 11, 0xAB, 60, 14, 1, 1000, 1001, 12, 0, 0, 0, 5) + b"p" * 14


class Heard:
    """A subscription's events one by one, decoded."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._ready: list[Event] = []

    async def next(self) -> Event:
        while not self._ready:
            batch = await anext(self._subscription)
            self._ready = [each if isinstance(each, Lost) else decode(each.data) for each in batch]
        return self._ready.pop(0)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def root(_events: Events) -> None:
    """What the tests need of the hive."""


@pytest.fixture(scope="module")
def emitter(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The object of emit.c."""
    target = tmp_path_factory.mktemp("emit") / "emit.o"
    return compile_one(find_clang(), Path(__file__).with_name("emit.c"), target).read_bytes()


@asynccontextmanager
async def running(
    emitter: bytes, **settings: object
) -> AsyncIterator[tuple[Events, Maps, Callable[..., int]]]:
    """The cell, started, and what outputs a packet as an event any number of times: the last one's result."""
    small: dict[str, object] = {
        "bpf-ct-global-tcp-max": 1024,
        "bpf-ct-global-any-max": 1024,
        "policy-map-pool": 1,
    }
    given = small | {name.replace("_", "-"): value for name, value in settings.items()}
    hive = Hive(config.cell, maps.cell, events.cell, invoke(root), settings=given)
    async with hive.started():
        table = hive.get(Maps).events
        with LoadedObject(emitter, "emit.o") as loaded:
            loaded.use_maps({"cilium_events": table.fd})
            loaded.load()
            program = loaded.programs()["emit"]

            def emit(data: bytes, times: int = 1) -> int:
                return run_program(program, data, repeat=times).retval

            with on_one_processor():  # what was lost is reported by the buffer of the processor that lost it
                yield hive.get(Events), hive.get(Maps), emit


@contextmanager
def foreign_reader(maps_: Maps) -> Iterator[Callable[[], list[bytes | int]]]:
    """Another program's reader of all CPUs, as bpftool map event_pipe is one."""
    rings = [Ring(cpu, 1) for cpu in range(os.cpu_count() or 1)]
    with map_by_id(maps_.events.id, writable=True) as table:
        for ring in rings:
            table.update(struct.pack("<I", ring.cpu), struct.pack("<I", ring.fd))
        try:
            yield lambda: [each for ring in rings for each in ring.read(100)]
        finally:
            for ring in rings:
                ring.close()


async def test_an_event_reaches_every_subscriber(emitter: bytes) -> None:
    async with running(emitter) as (events_, _, emit):
        with events_.subscribe() as first, events_.subscribe() as second:
            assert emit(DROPPED) == 0
            with anyio.fail_after(30):
                heard = await Heard(first).next()
                assert await Heard(second).next() == heard
        assert isinstance(heard, Drop)
        assert (heard.source, heard.reason, heard.packet) == (11, 133, b"p" * 14)
        assert event_text(heard).startswith("drop, Policy denied: from endpoint 11 ")


async def test_no_reader_is_attached_without_a_subscriber(emitter: bytes) -> None:
    async with running(emitter) as (events_, _, emit):
        descriptors = open_descriptors()
        assert emit(DROPPED) == -errno.ENOENT
        with events_.subscribe():
            assert emit(DROPPED) == 0
            with events_.subscribe():
                pass
            assert emit(DROPPED) == 0
        eventually(lambda: emit(DROPPED) == -errno.ENOENT)
        assert open_descriptors() == descriptors


async def test_lost_events_of_a_full_buffer_are_counted(emitter: bytes) -> None:
    async with running(emitter, monitor_num_pages=1) as (events_, _, emit):
        with events_.subscribe() as subscription, anyio.fail_after(30):
            assert emit(DROPPED, 500) == -errno.ENOSPC
            hearing = Heard(subscription)
            heard = [await hearing.next()]  # then all that found room has been read
            assert emit(DROPPED) == 0
            while not isinstance(heard[-1], Lost):
                heard.append(await hearing.next())
            missing = heard.pop()
            assert isinstance(missing, Lost)
            assert missing.cpu in range(possible_cpus())
            assert missing.count == subscription.lost == 500 - len(heard)
            assert isinstance(await hearing.next(), Drop)


async def test_the_buffer_goes_round_and_keeps_every_event(emitter: bytes) -> None:
    async with running(emitter, monitor_num_pages=1) as (events_, _, emit):
        with events_.subscribe() as subscription, anyio.fail_after(30):
            hearing = Heard(subscription)
            for n in range(300):
                data = b"\x7f" + struct.pack("<I", n) * (4 + n % 29)
                emit(data)
                event = await hearing.next()
                assert isinstance(event, Raw)
                assert event.data[: len(data)] == data
            assert subscription.lost == 0


async def test_more_than_one_turns_worth_is_read_without_another_event(emitter: bytes) -> None:
    async with running(emitter) as (events_, _, emit):
        with events_.subscribe() as subscription, anyio.fail_after(30):
            emit(DROPPED, 1000)
            hearing = Heard(subscription)
            for _ in range(1000):
                assert isinstance(await hearing.next(), Drop)
            assert subscription.lost == 0


async def test_a_foreign_reader_works_after_the_agent_detaches(emitter: bytes) -> None:
    async with running(emitter) as (events_, maps_, emit):
        with events_.subscribe():
            pass
        with foreign_reader(maps_) as read:
            assert emit(DROPPED) == 0
            assert [event[: len(DROPPED)] for event in read() if isinstance(event, bytes)] == [DROPPED]


async def test_ending_ours_leaves_a_reader_that_came_later(emitter: bytes) -> None:
    async with running(emitter) as (events_, maps_, emit):
        with ExitStack() as ends:
            with events_.subscribe():
                read = ends.enter_context(foreign_reader(maps_))
            assert emit(DROPPED) == 0
            assert len(read()) == 1


async def test_a_subscription_ends_with_the_agent(emitter: bytes) -> None:
    with ExitStack() as watching, anyio.fail_after(30):
        async with running(emitter) as (events_, _, emit):
            subscription = watching.enter_context(events_.subscribe())
            emit(DROPPED)
            assert isinstance(await Heard(subscription).next(), Drop)
        assert [event async for event in subscription] == []
        late = watching.enter_context(events_.subscribe())
        assert [event async for event in late] == []
