"""``cilium-bugtool``: the archive that ``cilium sysdump`` fetches from every agent's pod.

Its content is that of ``hive debug bundle``. Source: Cilium 1.17, bugtool/cmd; cilium-cli's sysdump, which
searches for the line ``GZIP at PATH``.
"""

import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from hive.agent.debug import bundle
from hive.client import DEFAULT_SOCKET, TIMEOUT
from hive.dbg.requests import socket_path


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.option("-o", "--archiveType", "kind", type=click.Choice(["gz"]), default="gz", help="Archive type: gz")
@click.option("--archive-prefix", default="", help="String to prefix to name of archive if created")
@click.option("-t", "--tmp", "folder", default="/tmp", help="Path to store extracted files")  # noqa: S108
@click.option("-H", "--host", default="", help="URI to server-side API")
@click.argument("others", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def cli(
    context: click.Context, kind: str, archive_prefix: str, folder: str, host: str, others: tuple[str, ...]
) -> None:
    """Collects agent & system information useful for bug reporting"""
    del kind
    context.obj = host or None
    if others:
        click.echo(f"without effect: {' '.join(others)}", err=True)
    prefix = f"{archive_prefix}-" if archive_prefix else ""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    target = Path(folder) / f"{prefix}cilium-bugtool-{stamp}.tar.gz"
    agent = socket_path() if host else DEFAULT_SOCKET
    context.invoke(bundle, target=target, bpf_root=Path("/sys/fs/bpf"), agent_socket=agent, timeout=TIMEOUT)
    click.echo(f"GZIP at {target}")


def main() -> NoReturn:
    """Run the command line; exits 0, or 1 for every failure."""
    try:
        cli.main(prog_name="cilium-bugtool", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(1)
    sys.exit(0)
