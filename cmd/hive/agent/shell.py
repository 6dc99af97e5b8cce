"""``hive shell``: commands to a running agent, or to any hive with an admin cell."""

from pathlib import Path

import click

DEFAULT_SOCKET = Path("/var/run/cilium/shell.sock")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--socket",
    "shell_socket",
    type=click.Path(path_type=Path),
    default=DEFAULT_SOCKET,
    show_default=True,
    help="The shell's socket.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND...]")
def command(shell_socket: Path, words: tuple[str, ...]) -> int:
    """Run COMMAND in the agent, or lines of standard input one by one; `help` lists all commands.

    On a terminal, lines have completion and history. Without one, the first failing line ends the shell.
    """
    from lifecycle import HiveError
    from lifecycle.command import shell

    try:
        return shell(shell_socket, words, "hive")
    except HiveError as error:
        raise click.ClickException(str(error)) from error
