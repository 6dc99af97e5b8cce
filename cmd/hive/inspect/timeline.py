"""``hive inspect --timeline``: a chart of the start."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from hive.inspect.text import width
from hive.output import QUIET

if TYPE_CHECKING:
    from lifecycle.graph import Graph, HookInfo, Span, Timeline

WAITS, RUNS, HOLDS = "·", "▒", "█"
SLOWEST = 10
_NUMBER, _TOOK, _HELD = 3, 8, 4


def chart(graph: "Graph", timeline: "Timeline", module: str | None = None) -> list[str]:
    """Return a chart: waiting and starting of hooks on one axis, their dependencies, the slowest
    constructors, sums.
    """
    sums = _sums(timeline) if module is None else []
    return [*_hooks(graph, timeline, module), *_constructors(graph, timeline, module), *sums]


def _hooks(graph: "Graph", timeline: "Timeline", module: str | None) -> Iterator[str]:
    from lifecycle.graph import critical_path, held_by

    started = timeline.of("start")
    if not started:
        yield "No hook has started yet."
        return
    hooks = sorted(
        graph.hooks, key=lambda hook: started[hook.id].began if hook.id in started else float("inf")
    )
    numbers = {hook.id: number for number, hook in enumerate(hooks, 1)}
    held, path = held_by(graph, timeline), critical_path(graph, timeline)
    origin, length = _extent(list(started.values()))
    label = min(32, max(len(_label(hook)) for hook in hooks))
    columns = max(10, width() - _NUMBER - label - _TOOK - _HELD - 3)
    yield f"{len(started)} of {len(hooks)} hooks started in {_ms(length)}, each when all it waits for had."
    yield (
        f"{click.style(RUNS, fg='blue')} starting   {click.style(WAITS, fg=QUIET)} waiting   "
        f"{click.style(HOLDS, fg='yellow')} starting, and all waited for it   <n held by hook n"
    )
    yield f"{' ' * (_NUMBER + 1 + label)} {_axis(length, columns)}"
    for hook in hooks:
        if module is not None and not f"{hook.module}.".startswith(f"{module}."):
            continue
        name = _label(hook) if len(_label(hook)) <= label else _label(hook)[: label - 1] + "…"
        span = started.get(hook.id)
        if span is None:
            yield f"{numbers[hook.id]:{_NUMBER}} {name:{label}} not started yet"
            continue
        lane = _lane(span, origin, length, columns, critical=hook.id in path)
        holder = f"<{numbers[held[hook.id]]}" if hook.id in held else ""
        yield f"{numbers[hook.id]:{_NUMBER}} {name:{label}} {lane}{_ms(span.took):>{_TOOK}} {holder}".rstrip()


def _constructors(graph: "Graph", timeline: "Timeline", module: str | None) -> Iterator[str]:
    nodes = {
        node.id: node for node in graph.nodes if module is None or f"{node.module}.".startswith(f"{module}.")
    }
    spans = [span for span in timeline.spans if span.kind in {"construct", "invoke"} and span.id in nodes]
    if not spans:
        return
    slowest = sorted(spans, key=lambda span: span.took, reverse=True)[:SLOWEST]
    total = sum(span.took for span in spans)
    yield ""
    yield f"{len(spans)} constructed and invoked in {_ms(total)}; the slowest:"
    label = min(44, max(len(_name(nodes[span.id].name, nodes[span.id].module)) for span in slowest))
    columns = max(10, width() - label - _TOOK - 4)
    for span in slowest:
        name = _name(nodes[span.id].name, nodes[span.id].module)
        bar = RUNS * max(1, round(columns * span.took / slowest[0].took)) if slowest[0].took else ""
        shown = name if len(name) <= label else name[: label - 1] + "…"
        yield f"  {shown:{label}} {_ms(span.took):>{_TOOK}} {click.style(bar, fg='blue')}".rstrip()


def _sums(timeline: "Timeline") -> Iterator[str]:
    if not timeline.sums:
        return
    yield ""
    yield "Counted together; what starts at the same time counts in each:"
    label, most = max(map(len, timeline.sums)), max(timeline.sums.values())
    columns = max(10, width() - label - _TOOK - 4)
    for name, took in timeline.sums.items():
        bar = RUNS * max(1, round(columns * took / most)) if most else ""
        yield f"  {name:{label}} {_ms(took):>{_TOOK}} {click.style(bar, fg='blue')}".rstrip()


def _label(hook: "HookInfo") -> str:
    return _name(hook.name, hook.module)


def _name(name: str, module: str) -> str:
    return f"{name} ({module.rpartition('.')[2]})"


def _extent(spans: "Sequence[Span]") -> tuple[float, float]:
    """Return when the first step began, and the duration until the last one ended."""
    origin = min(span.began for span in spans)
    return origin, max(max(span.ended for span in spans) - origin, 1e-6)


def _axis(length: float, columns: int) -> str:
    """Return the labels of the axis: 0, the middle and the end."""
    middle, end = _ms(length / 2), _ms(length)
    left = f"0{middle:>{columns // 2 + len(middle) // 2}}"
    return left + f"{end:>{max(len(end) + 1, columns - len(left))}}"


def _lane(span: "Span", origin: float, length: float, columns: int, *, critical: bool) -> str:
    before = min(columns - 1, int(columns * (span.began - origin) / length))
    runs = min(columns - before, max(1, round(columns * span.took / length)))
    waiting = click.style(WAITS * before, fg=QUIET)
    bar = click.style((HOLDS if critical else RUNS) * runs, fg="yellow" if critical else "blue")
    return waiting + bar + " " * (columns - before - runs)


def _ms(seconds: float) -> str:
    """Format milliseconds with two significant digits: 0.04, 1.6, 21 ms."""
    value = seconds * 1000
    return f"{value:.{0 if value >= 10 else 1 if value >= 1 else 2}f} ms"
