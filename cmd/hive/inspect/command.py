"""``hive inspect``: the dependency graph of a hive, and the timing of its start."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hive.agent.command import pass_settings, settings_argument
from hive.agent.process import refuse
from hive.client import ask, module_health, socket_option, timeout_option

if TYPE_CHECKING:
    from lifecycle.graph import Graph, Timeline

DIFFERENT = 1
FAULTY = 1
T = TypeVar("T")

FORMATS = ("tree", "dot", "mermaid", "json", "html")

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings=pass_settings)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="tree (the default), Graphviz, Mermaid, JSON, or a page for the browser.",
)
@click.option("--module", metavar="M", help="Only this module and those inside it: agent.ipam, or ipam.")
@click.option("--why", metavar="TYPE", help="The dependency chains from invoked functions to a type.")
@click.option("--unused", is_flag=True, help="Constructors that no invoked function depends on.")
@click.option(
    "--circles", is_flag=True, help="Modules that depend on each other, with the responsible edges."
)
@click.option("--settings", "show_settings", is_flag=True, help="Every setting: its value and origin.")
@click.option("--hooks", is_flag=True, help="The start order of hooks, with their dependencies.")
@click.option("--diff", nargs=2, type=_file, metavar="A.json B.json", help="What changed between two graphs.")
@click.option("--live", is_flag=True, help="Show the running agent.")
@click.option("--timeline", is_flag=True, help="A chart of the running agent's start.")
@click.option(
    "--schema", is_flag=True, help="The JSON Schema of --format json; with --timeline, of its JSON."
)
@click.option(
    "--of",
    "--hive",
    metavar="operator|PACKAGE:NAME",
    help="Show another hive than the agent: the operator's, or a Cell or Hive to import.",
)
@socket_option
@timeout_option
@settings_argument
def command(
    form: str | None,
    module: str | None,
    why: str | None,
    diff: tuple[Path, Path] | None,
    agent_socket: Path,
    timeout: float,
    settings: tuple[str, ...],
    of: str | None,
    schema: bool,
    **views: bool,
) -> int:
    """Show the agent's modules, constructors, settings and hooks; nothing is started.

    Accepts the settings of hive agent; --settings shows their values and origins. All faults of a graph are
    listed and drawn in red, and the exit code is 1, as when --diff finds a difference or --circles a circle.
    """
    from lifecycle import BuildError, GraphError

    if schema:
        click.echo(_schema(timeline=views["timeline"]))
        return 0
    live = views.pop("live") or views["timeline"]
    chosen = _one_view(views, why, diff)
    _refuse_incompatible_options(chosen, form, module, live=live, of=of, settings=settings)
    if diff:
        return _show_diff(*diff, as_json=form == "json")
    socket = functools.partial(ask, agent_socket=agent_socket, timeout=timeout)
    try:
        graph = _live_graph(socket) if live else _graph(of, settings)
    except GraphError as error:
        return refuse(error, broken=FAULTY)
    except BuildError as error:
        raise click.ClickException(str(error)) from error
    wanted_timeline = live and (chosen == "timeline" or form == "html")
    timeline = _timeline(socket) if wanted_timeline else None
    health = module_health(socket) if live and form == "html" else None
    if module is not None:
        from lifecycle.graph import find_module

        module = _usage(find_module, graph, module)
    if chosen is None or form == "html":
        _show_graph(graph, form or "tree", module, timeline, health)
    else:
        _show_view(chosen, graph, module, why or "", timeline, as_json=form == "json")
    return _report_faults(graph) or FAULTY * (chosen == "circles" and _has_circles(graph))


def _has_circles(graph: "Graph") -> bool:
    from lifecycle.graph import circles

    return bool(circles(graph))


def _report_faults(graph: "Graph") -> int:
    """Print why the shown hive cannot be built, in full; return the exit code."""
    if not graph.faults:
        return 0
    from lifecycle import Fault, GraphError

    faults = [Fault(fault.kind, fault.text, fault.details) for fault in graph.faults]
    return refuse(GraphError(graph.name, faults), broken=FAULTY)


def _schema(*, timeline: bool) -> str:
    from lifecycle.graph import graph_schema, timeline_schema

    return json.dumps(timeline_schema() if timeline else graph_schema(), indent=2)


def _one_view(views: dict[str, bool], why: str | None, diff: object) -> str | None:
    """Return the view selected by an option, or None for the graph itself."""
    named = {"show_settings": "settings"}
    chosen = [named.get(name, name) for name, wanted in views.items() if wanted]
    chosen += ["why"] * (why is not None) + ["diff"] * (diff is not None)
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]}: choose one")
    return chosen[0] if chosen else None


def _refuse_incompatible_options(
    view: str | None, form: str | None, module: str | None, *, live: bool, of: str | None, settings: object
) -> None:
    allowed = {"json", "html"} if view == "timeline" else {"json"}
    if view and form and form not in allowed:
        raise click.UsageError(f"--{view} has no --format {form}: expected {' or '.join(sorted(allowed))}")
    if module and view in {"why", "diff", "circles"}:
        raise click.UsageError(f"--module: --{view} is about the whole graph")
    if live and (of or settings):
        raise click.UsageError(f"{of or 'settings'}: not with --live; the running agent has its own")
    if view == "diff" and (live or of or settings):
        raise click.UsageError("--diff compares two files: expected nothing besides")


def _graph(of: str | None, settings: tuple[str, ...]) -> "Graph":
    from hive.inspect.source import hive_of

    return hive_of(of, settings).graph(faulty=True)


def _live_graph(socket: Callable[[str], Any]) -> "Graph":
    from lifecycle.graph import read_graph

    return _answer(read_graph, socket, "/hive/graph")


def _timeline(socket: Callable[[str], Any]) -> "Timeline":
    from lifecycle.graph import read_timeline

    return _answer(read_timeline, socket, "/hive/timeline")


def _answer(read: Callable[[str], T], socket: Callable[[str], Any], path: str) -> T:
    try:
        return read(json.dumps(socket(path)))
    except ValueError as error:
        raise click.ClickException(f"the agent's answer to GET {path}: {error}") from error


def _show_graph(
    graph: "Graph",
    form: str,
    module: str | None,
    timeline: "Timeline | None",
    health: dict[str, tuple[str, str]] | None,
) -> None:
    from lifecycle.graph import show

    if form == "html":
        text = (graph if module is None else graph.only(module)).html(timeline, health)
    else:
        text = show(graph, form, module or "")
    if form == "tree":
        from hive.inspect.text import coloured

        text = coloured(text)
    click.echo(text.rstrip("\n"))


def _show_view(
    view: str, graph: "Graph", module: str | None, wanted: str, timeline: "Timeline | None", *, as_json: bool
) -> None:
    from hive.inspect import timeline as inspect_timeline
    from hive.inspect.text import paint, width
    from lifecycle.graph import show

    if view != "timeline":
        name = wanted if view == "why" else module or ""
        click.echo(_usage(show, graph, view, name, paint=paint, width=width(), as_json=as_json))
        return
    assert timeline is not None  # noqa: S101  # this view asked for it
    for line in [timeline.json()] if as_json else inspect_timeline.chart(graph, timeline, module):
        click.echo(line)


def _show_diff(before: Path, after: Path, *, as_json: bool) -> int:
    from hive.inspect.text import paint
    from lifecycle.graph import diff, differences, read_graph

    graphs = []
    for path in (before, after):
        try:
            graphs.append(read_graph(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{path}: {error}") from error
    changes = diff(*graphs)
    click.echo(differences(changes, paint=paint, as_json=as_json))
    return DIFFERENT if changes else 0


def _usage(call: Callable[..., T], *arguments: object, **options: object) -> T:
    """Return the result of `call`; convert its ValueError to a usage error."""
    try:
        return call(*arguments, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
