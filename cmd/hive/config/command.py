"""``hive config``: the reference of settings, their values, and differences from the running agent."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hive.agent.command import pass_settings, settings_argument
from hive.agent.process import ENV_PREFIX, FILE_FLAG, YAML_NAME, build, refuse
from hive.client import agent_options, ask
from hive.config.get import get_setting
from hive.config.set import set_options
from hive.output import GOOD, QUIET, document, fact_lines, fitted, terminal_width

if TYPE_CHECKING:
    from lifecycle import Cell

REFUSED = "(refused)"
"""Name of a Change for invalid settings."""


@click.group()
def command() -> None:
    """Show settings and their values, compare them with the running agent, change its options."""


@command.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["markdown", "schema"]),
    default="markdown",
    show_default=True,
    help="A Markdown page, or a JSON Schema.",
)
@click.option(
    "--of",
    type=click.Choice(["agent", "operator"]),
    default="agent",
    show_default=True,
    help="Settings of the agent or the operator.",
)
def reference(form: str, of: str) -> None:
    """Print every setting: its type, default and meaning.

    The schema describes an object with settings by name, such as a ConfigMap before its values are converted
    to strings.
    """
    from lifecycle import Sources
    from lifecycle.graph import json_schema, markdown, sections

    found, title = sections(*_process(of)), f"Settings of the {of}"
    if form == "schema":
        text = json_schema(found, title)
    else:
        asked = "hive config reference" if of == "agent" else f"hive config reference --of {of}"
        note = f"Generated from the code by `{asked}`; a test keeps it up to date."
        text = markdown(
            found, title, note, Sources(prefix=ENV_PREFIX, yaml_name=YAML_NAME, file_flag=FILE_FLAG)
        )
    click.echo(text, nl=False)


def _process(name: str) -> "tuple[Cell, ...]":
    """Return all cells of the agent, or of the operator with its inner hive."""
    if name == "operator":
        from cells.operator import LEADER, operator
        from lifecycle import module

        inside = module("operator", "Operator", module("leader", "Tasks of the leader", *LEADER))
        return operator, inside
    from cells.agent import agent

    return (agent,)


@command.command("list", context_settings=pass_settings)
@settings_argument
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
@click.option("--set", "given", is_flag=True, help="Only settings that differ from their default.")
@click.option("--live", is_flag=True, help="Show those of the running agent.")
@agent_options
def list_settings(
    settings: tuple[str, ...],
    origin: bool,
    given: bool,
    live: bool,
    agent_socket: Path,
    timeout: float,
    output: str,
) -> int:
    """List every setting with its value: of a new agent, or of the running one (--live).

    Settings are given as to `hive agent`: flags, environment, --config-dir. Invalid ones are reported, with
    exit code 2.
    """
    if live:
        if settings:
            raise click.UsageError(
                f"{settings[0]}: --live asks what runs; settings are for an agent to start"
            )
        found = ask("/hive/config", agent_socket, timeout=timeout)["settings"]
    else:
        from lifecycle import GraphError

        hive = build(settings)
        try:
            loaded = hive.settings()
        except GraphError as error:
            return refuse(error)
        for warning in hive.warnings():
            click.echo(f"hive: warning: {warning}", err=True)
        found = [{"name": one.option.name, "value": one.text, "origin": one.origin} for one in loaded]
    found = sorted(
        (one for one in found if not given or one["origin"] != "default"), key=lambda one: one["name"]
    )
    if (text := document(found, output)) is not None:
        click.echo(text)
        return 0
    for line in render(found, terminal_width(), ("name", "value", "origin") if origin else ("name", "value")):
        click.echo(line)
    return 0


def render(found: list[dict[str, str]], width: int | None, columns: tuple[str, ...]) -> list[str]:
    """Return a table; on a narrow terminal, details are beside or below each setting."""
    lines = fitted(found, None, "", columns)
    if width is None or all(len(click.unstyle(line)) <= width for line in lines):
        return lines
    facts = []
    for one in found:
        rest = [click.style(one[column], fg=QUIET) for column in columns[2:]]
        facts.append((f"{one['name']}:", "   ".join([one["value"] or '""', *rest])))
    return list(fact_lines(facts, width))


def _show(changes: list[dict[str, str]]) -> None:
    """Print a table of what a restart would change and, if settings are invalid, the errors."""
    wrong = [one["configured"] for one in changes if one["name"] == REFUSED]
    right = [one for one in changes if one["name"] != REFUSED]
    for line in right and fitted(
        right, terminal_width(), "-o json", ("name", "running", "configured", "origin")
    ):
        click.echo(line)
    for text in wrong:
        click.echo(f"hive: {text}", err=True)
    advice = "The agent would not start again: correct this first." if wrong else "A restart applies this."
    click.echo(advice, err=True)


@command.command()
@agent_options
def diff(agent_socket: Path, timeout: float, output: str) -> int:
    """Show which settings a restart of the running agent would change. Exits 1 if there are any.

    The agent watches its config-dir, such as a mounted ConfigMap, and its config file; nothing takes effect
    before a restart.
    """
    answer: dict[str, Any] = ask("/hive/config", agent_socket, timeout=timeout)
    changes = answer["changes"]
    if (text := document(changes, output)) is not None:
        click.echo(text)
    elif changes:
        _show(changes)
    elif not answer["places"]:
        click.echo("The agent has no config-dir and no config file: what it runs with cannot change.")
    else:
        click.echo(click.style(f"{answer['places']} matches the running configuration.", fg=GOOD))
    return 1 if changes else 0


command.add_command(get_setting)
command.add_command(set_options)
