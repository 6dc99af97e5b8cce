"""Output of checks: a line for each result with its errors below, and a document for programs."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click

from hive.check.checks import CHECKS, NAMES, NEEDED
from hive.check.run import FAMILIES, Result, Run
from hive.output import BAD, GOOD, QUIET, json_text, line_fitted, terminal_width

F = TypeVar("F", bound=Callable[..., object])
COLOURS: Final = {"passed": GOOD, "failed": BAD, "skipped": QUIET}
_MOST: Final = 6
"""Maximum number of error lines of a check; the others are counted."""
_WIDEST: Final = 1000
_INDENT: Final = 10


def options(command: F) -> F:
    """Add the options of every command that runs checks."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end."),
        click.option(
            "--skip",
            multiple=True,
            type=click.Choice(NAMES),
            metavar="CHECK",
            help="Skip this check; may be repeated.",
        ),
        click.option(
            "--only",
            multiple=True,
            type=click.Choice(NAMES),
            metavar="CHECK",
            help=f"Run only this check; may be repeated: {', '.join(NAMES)}.",
        ),
        click.option(
            "--within",
            type=click.FloatRange(min=0.1),
            default=10.0,
            show_default=True,
            help="Seconds for which each check tries before it fails.",
        ),
    ):
        command = option(command)
    return command


def chosen(only: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """Return the checks to run. Raises click.UsageError if none is left, or if others depend on a skipped
    one.
    """
    if needed := [name for name in skip if name in NEEDED]:
        raise click.UsageError(f"--skip {needed[0]}: every other check needs it")
    wanted = [name for name in NAMES if name in (*NEEDED, *(only or NAMES)) and name not in skip]
    if only and set(wanted) == set(NEEDED) and not set(only) & set(NEEDED):
        raise click.UsageError("--only and --skip leave no check")
    return tuple(wanted)


def perform(run: Run, names: Sequence[str], *, as_json: bool) -> None:
    """Run checks and print the results. Raises click.exceptions.Exit with 1 if one failed."""
    began = time.monotonic()
    printer = _Printer(quiet=as_json)
    printer.header(run)
    results = []
    printer.running(_title(run, names[0]))
    for result in run.results(check for check in CHECKS if check.name in names):
        results.append(result)
        printer.show(result)
        if following := names[names.index(result.name) + 1 :]:
            printer.running(_title(run, following[0]))
    seconds = time.monotonic() - began
    counts = {state: sum(one.state == state for one in results) for state in COLOURS}
    if as_json:
        click.echo(json_text(_document(run, results, counts, seconds)))
    else:
        printer.end(counts, seconds)
    if counts["failed"]:
        raise click.exceptions.Exit(1)


def _title(run: Run, name: str) -> str:
    return next(one.title for one in CHECKS if one.name == name).format(routing=run.facts.routing)


def _document(run: Run, results: Sequence[Result], counts: dict[str, int], seconds: float) -> dict[str, Any]:
    return {
        "ok": not counts["failed"],
        "cluster": run.facts.cluster,
        "routing": run.facts.routing,
        "nodes": list(run.wanted),
        "families": [FAMILIES[version] for version in run.versions],
        "seconds": round(seconds, 3),
        **counts,
        "checks": [dataclasses.asdict(one) for one in results],
    }


class _Printer:
    """Prints lines for users; none with ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stdout.isatty() and not quiet
        self._width = terminal_width() or _WIDEST

    def header(self, run: Run) -> None:
        nodes = len(run.wanted)
        count = f"{nodes} {'node' if nodes == 1 else 'nodes'}"
        self._line(f"{run.facts.cluster}: {count}, routing {run.facts.routing}")

    def running(self, title: str) -> None:
        """Show the running check, on a terminal."""
        if self._live:
            click.echo(f"{'...':{_INDENT}}{title}"[: self._width - 1], nl=False)

    def show(self, result: Result) -> None:
        if self._live:
            click.echo("\r\033[K", nl=False)
        state = click.style(f"{result.state:{_INDENT}}", fg=COLOURS[result.state])
        tries = f"  {result.tries} {'try' if result.tries == 1 else 'tries'}" if result.tries else ""
        for line in line_fitted(f"{state}{result.name}: {result.title}{tries}", self._width):
            self._line(line)
        if result.note:
            self._below(result.note)
        for text in result.failures[:_MOST]:
            self._below(text)
        if len(result.failures) > _MOST:
            self._below(f"and {len(result.failures) - _MOST} more (--json has all)")
        if result.what_to_do:
            self._below(f"What to do: {result.what_to_do}")
            self._below(f"See: {result.see}")

    def end(self, counts: dict[str, int], seconds: float) -> None:
        words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        self._line(f"{words}, in {seconds:.0f} s")

    def _below(self, text: str) -> None:
        indent = " " * _INDENT
        for line in textwrap.wrap(
            text,
            self._width,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        ):
            self._line(line)

    def _line(self, text: str) -> None:
        if not self._quiet:
            click.echo(text)
            sys.stdout.flush()
