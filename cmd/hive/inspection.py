"""``hive inspect``: what the agent is made of and who needs whom, without starting any of it.

Needs: cells.agent and lifecycle, imported when called; no privileges.   Gives: command.
"""

import click

from hive.agent import build, pass_settings, refuse, settings_argument


@click.command(context_settings=pass_settings)
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "dot", "json"]),
    default="tree",
    show_default=True,
    help="For people, for Graphviz, or for programs.",
)
@settings_argument
def command(form: str, settings: tuple[str, ...]) -> int:
    """Show the agent's modules, constructors, settings and hooks; nothing is started.

    Takes the settings of hive agent, and shows their values and origins. A graph with faults is not shown:
    all its faults are, and the exit code is 1.
    """
    from lifecycle import GraphError

    try:
        graph = build(settings).graph()
    except GraphError as error:
        return refuse(error, broken=1)
    text = {"tree": graph.tree, "dot": graph.dot, "json": graph.json}[form]()
    click.echo(text.rstrip("\n"))
    return 0
