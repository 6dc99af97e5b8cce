"""The framework benchmark is valid: all build the same graph, and tables deliver all events."""

from collections.abc import Awaitable, Callable

import pytest

from tests.bench import framework
from tests.bench.graphs import BUILDERS, Built, Shape


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_every_builder_builds_the_graph(build: Callable[[Shape], Built]) -> None:
    built = build(Shape.of(50))
    assert built.construct > 0
    assert built.resolve > 0


def test_a_generated_graph_has_one_root() -> None:
    shape = Shape.of(200)
    assert len(shape.needs) == 200
    assert set(range(199)) == {need for needs in shape.needs for need in needs}
    assert all(need < number for number, needs in enumerate(shape.needs) for need in needs)


@pytest.mark.anyio
@pytest.mark.parametrize("run", framework.HOOK_RUNS.values(), ids=framework.HOOK_RUNS)
async def test_hooks_are_started_and_stopped(
    run: Callable[[], Awaitable[tuple[float, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework, "HOOKS", 10)
    start, stop = await run()
    assert start > 0
    assert stop > 0


@pytest.mark.parametrize(
    "figure", framework.TABLE_FIGURES, ids=[what for what, *_ in framework.TABLE_FIGURES]
)
def test_tables_and_their_peers_are_written(
    figure: tuple[str, Callable[[], float], str, Callable[[], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework, "ROWS", 400)
    _, ours, _, theirs = figure
    assert ours() > 0
    assert theirs() > 0
