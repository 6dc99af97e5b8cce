"""``hive completion``: the script that makes a shell complete the command line.

Needs: click, which answers the shell.   Gives: command.
"""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HIVE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a completion script for SHELL; for bash: source <(hive completion bash)."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"click knows no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "hive", VARIABLE).source())
