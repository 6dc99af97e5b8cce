"""OpenTelemetry spans of a hive: its start, runs of jobs, batches of reconcilers."""

from collections.abc import Collection, Mapping

import anyio
import pytest

from lifecycle import Hive, Hook, Jobs, Lifecycle, Reconciler, StartError, Table, Target, invoke, module
from lifecycle.jobs import Pool
from lifecycle.production import traces
from lifecycle.testing import HiveStarter, eventually

pytest.importorskip(
    "opentelemetry.sdk", reason="opentelemetry-sdk is of the packages that make test installs"
)

import anyio.lowlevel
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self.exporter.get_finished_spans() if one.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found


async def test_a_start_is_a_span_with_one_for_each_hook(hive: HiveStarter) -> None:
    spans = Spans()

    def shop(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open", lambda: anyio.sleep(0.01)))

    await hive(traces(spans.provider), module("shop", "A shop", invoke(shop)))
    whole, part = spans.one("start"), spans.one("start open")
    assert part.parent.span_id == whole.context.span_id
    assert dict(part.attributes) == {"lifecycle.module": "shop", "lifecycle.step": "start"}
    assert whole.start_time <= part.start_time <= part.end_time <= whole.end_time
    assert part.end_time - part.start_time >= 9e6
    assert spans.named("invoke shop")


@pytest.mark.anyio
async def test_a_start_that_fails_is_an_error() -> None:
    spans = Spans()

    async def fail() -> None:
        raise OSError("no")

    def shop(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open", fail))

    with pytest.raises(StartError):
        await Hive(traces(spans.provider), invoke(shop)).start()
    assert {spans.one(name).status.status_code.name for name in ("start", "start open")} == {"ERROR"}


async def test_runs_of_jobs_are_spans_around_those_of_their_work(hive: HiveStarter) -> None:
    spans = Spans()
    tries = 0

    def worker(jobs: Jobs) -> None:
        async def work() -> None:
            nonlocal tries
            tries += 1
            with trace.get_tracer("mine", tracer_provider=spans.provider).start_as_current_span("inside"):
                pass
            if tries == 1:
                raise LookupError("again")

        pool: Pool[str] = jobs.pool("items", lambda item: anyio.lowlevel.checkpoint())
        pool.put("one")
        jobs.one_shot("work", work)

    await hive(traces(spans.provider), module("shop", "A shop", invoke(worker)))
    await eventually(lambda: len(spans.named("job work")) == 2)
    failed, done = spans.named("job work")
    assert (failed.status.status_code.name, done.status.status_code.name) == ("ERROR", "UNSET")
    assert failed.events[0].name == "exception"
    assert [one.parent.span_id for one in spans.named("inside")] == [
        one.context.span_id for one in (failed, done)
    ]
    assert dict(done.attributes) == {"lifecycle.module": "shop", "lifecycle.job": "work"}
    assert spans.one("job items")


class Kernel(Target[int, int, int]):
    async def observe(self) -> Mapping[int, int]:
        return {}

    def matches(self, row: int, observed: int) -> bool:
        return row == observed

    async def put(self, batch: Mapping[int, int]) -> None: ...

    async def drop(self, batch: Collection[int]) -> None: ...


async def test_batches_of_reconcilers_are_spans(hive: HiveStarter) -> None:
    spans = Spans()
    numbers: Table[int, int] = Table("numbers", key=lambda number: number)
    reconciler = Reconciler(numbers, Kernel(), full_every=600)
    numbers.put(1)

    def run(jobs: Jobs) -> None:
        jobs.observe("reconcile", reconciler)

    await hive(traces(spans.provider), invoke(run))
    await eventually(lambda: spans.named("reconcile"))
    assert dict(spans.one("reconcile").attributes) == {"lifecycle.table": "numbers", "lifecycle.objects": 1}


async def test_a_hive_without_traces_has_no_spans(hive: HiveStarter) -> None:
    from lifecycle.hooks.spans import in_force, span

    assert in_force.get() is None
    with span("nothing", {"attribute": 1}) as nothing:
        assert nothing is None
