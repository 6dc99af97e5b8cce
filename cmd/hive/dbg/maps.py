"""``cilium-dbg map`` and ``metrics``: the agent's cached content of its maps, and its metrics.

Source: Cilium 1.17, cilium-dbg/cmd/{map,metrics}*.go.
"""

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import click

from cells.base.regexp import RegexpError, compile_regexp
from hive.client import follow as follow_lines
from hive.dbg.go_text import MAPS, aligned, model, output_option, printed, table
from hive.dbg.main import Group, needed
from hive.dbg.requests import RequestFailedError, ask, decoded, explain, path_of, send, socket_path


@click.group("map", cls=Group)
def map_group() -> None:
    """Access userspace cached content of BPF maps"""


@map_group.command("list")
@click.option("--verbose", is_flag=True, help="Print cache contents of all maps")
@output_option
def list_maps(verbose: bool, output: str) -> None:
    """List all open BPF maps"""
    try:
        found = ask("GET /map")
    except RequestFailedError as error:
        raise click.ClickException(str(error)) from error
    if output:
        click.echo(printed(model(found, MAPS), output, "cells.api.models.node:BPFMapList"))
    elif found.get("maps") is None:
        return
    elif verbose:
        for one in found["maps"]:
            click.echo(f"## Map: {_name(one)}\n{_contents(one)}\n")
    else:
        rows = []
        for one in found["maps"]:
            cache = one.get("cache")
            errors = sum(bool(entry.get("last-error")) for entry in cache or ())
            rows.append((_name(one), len(cache or ()), errors, "false" if cache is None else "true"))
        click.echo(table(("Name", "Num entries", "Num errors", "Cache enabled"), rows))


def _name(one: dict[str, Any]) -> str:
    return str(one.get("path", "")).rpartition("/")[2]


def _contents(one: dict[str, Any]) -> str:
    cache = one.get("cache")
    if cache is None:
        return "Cache is disabled\n"
    if not cache:
        return "Cache is empty\n"
    keys = ("key", "value", "desired-action", "last-error")
    rows = [[entry.get(key, "") for key in keys] for entry in cache]
    return table(("Key", "Value", "State", "Error"), rows)


@map_group.command("get")
@needed("name", "map name must be specified")
@output_option
def get_map(name: str, output: str) -> None:
    """Display cached content of given BPF map"""
    try:
        found = ask("GET /map/{name}", name=name)
    except RequestFailedError as error:
        raise click.ClickException(str(error)) from error
    kind = "cells.api.models.node:BPFMap"
    click.echo(printed(model(found, MAPS["maps[]"]), output, kind) if output else _contents(found))


@map_group.command()
@needed("name", "map name must be specified")
@click.option("-f", "--follow", is_flag=True, help="If set then events will be streamed")
@output_option
def events(name: str, follow: bool, output: str) -> None:
    """Display cached list of events for a BPF map"""
    for one in _events(name, follow):
        if output:
            click.echo(printed(one, output))
        else:
            time = re.sub(r"\.\d+(?=Z|[+-])", "", one.get("timestamp") or "0001-01-01T00:00:00Z")
            key, value, fault = (_quoted(one.get(name) or "") for name in ("key", "value", "last-error"))
            states = f"action={one.get('action', '')} desiredState={one.get('desired-action', '')}"
            click.echo(f"key={key} value={value} time={time} {states} lastError={fault}")


def _quoted(text: str) -> str:
    """Return a text with quotation marks and ends of lines escaped twice, as by Cilium's client."""
    escaped = text.replace('"', r"\"").replace("\n", r"\n").replace("\t", r"\n")
    return json.dumps(escaped, ensure_ascii=False)


def _events(name: str, follow: bool) -> Iterator[dict[str, Any]]:
    """Yield changes of a map, the oldest first. Raises click.ClickException."""
    path = path_of("/map/{name}/events", {"name": name}, {"follow": "true" if follow else "false"})
    if follow:
        yield from follow_lines(path, socket_path())
        return
    try:
        status, content = send("GET", path)
        found = [decoded(line) for line in content.splitlines()] if status == http.client.OK else []
    except RequestFailedError as error:
        raise click.ClickException(f"could not get map name events: {error}") from error
    if status != http.client.OK:
        reason = explain("GET /map/{name}/events", status, content)
        raise click.ClickException(f"could not get map name events: {reason}")
    yield from found


@click.group(cls=Group)
def metrics() -> None:
    """Access metric status"""


@metrics.command("list")
@click.option("-p", "--match-pattern", default="", help="Show only metrics whose names match matchpattern")
@output_option
def list_metrics(match_pattern: str, output: str) -> None:
    """List all metrics for Cilium"""
    try:
        wanted = compile_regexp(match_pattern)
    except RegexpError as error:
        raise click.ClickException(f"Cannot compile regex: {error}\n") from error
    try:
        found = ask("GET /metrics/")
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get metrics list: {error}") from error
    chosen = [one for one in found if wanted.search(one.get("name", ""))]
    if output:
        click.echo(printed([{"value": 0.0, **model(one)} for one in chosen], output))
        return
    lines = ["Metric\tLabels\tValue"]
    for one in chosen:
        labels = " ".join(f'{key}="{value}"' for key, value in sorted((one.get("labels") or {}).items()))
        lines.append(f"{one.get('name', '')}\t{labels}\t{one.get('value', 0):f}")
    click.echo(aligned("\n".join(lines)))


COMMANDS: Final = {"map": map_group, "metrics": metrics}
