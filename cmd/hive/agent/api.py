"""``hive api``: the operations of the agent's REST API, for people and as an OpenAPI document."""

import click

from hive.output import detailed, document, output_option, table_width


@click.command()
@output_option
def command(output: str) -> None:
    """List the operations of the agent's REST API.

    With -o json or -o yaml, the OpenAPI document of them: parameters, bodies, answers.
    """
    from cells.api import openapi

    if (text := document(openapi.document(), output)) is not None:
        click.echo(text)
        return
    rows = [((one.id, one.method, one.path), [one.summary]) for one in openapi.DESCRIBED if not one.alias]
    for line in detailed(("OPERATION", "METHOD", "PATH", "SUMMARY"), rows, table_width(output)):
        click.echo(line)
