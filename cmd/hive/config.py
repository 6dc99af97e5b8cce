"""``hive config``: what can be set.

Needs: cells.agent and lifecycle, imported when called; no privileges.   Gives: command.
"""

import click

from hive.agent import YAML_NAME

TITLE = "Settings of the agent"


@click.group()
def command() -> None:
    """What can be set, and how."""


@command.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["markdown", "schema"]),
    default="markdown",
    show_default=True,
    help="A page for people, or a JSON Schema for programs.",
)
def reference(form: str) -> None:
    """Print every setting of the agent: its type, default and meaning.

    The schema is that of an object with settings by their names, as in a ConfigMap before its values are
    turned into texts.
    """
    from cells.agent import agent
    from lifecycle import Sources
    from lifecycle.reference import json_schema, markdown, sections

    found = sections(agent)
    if form == "schema":
        text = json_schema(found, TITLE)
    else:
        note = "Generated from the code by `hive config reference`; a test keeps it up to date."
        text = markdown(found, TITLE, note, Sources(yaml_name=YAML_NAME))
    click.echo(text, nl=False)
