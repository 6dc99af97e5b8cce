"""``hive mount-cgroup``: mounts cgroup v2 where the agent expects it.

Source: Cilium 1.17, tools/mount: a node without this mount can still have pods, so failures are not fatal.
"""

from pathlib import Path

import click

from hive import syscalls
from hive.init.host import enter_host, host_option


@click.command()
@host_option
@click.argument("directory", type=click.Path(path_type=Path, readable=False))
def command(directory: Path, host_process: Path | None) -> None:
    """Mount cgroup v2 on DIRECTORY, unless it is mounted there.

    Errors are printed; the exit code is always 0.
    """
    try:
        if host_process is not None:
            enter_host(host_process, ("cgroup", "mnt"))
        click.echo(mount_cgroup(directory))
    except OSError as error:
        click.echo(f"hive: warning: cgroup v2 is not mounted on {directory}: {error}", err=True)


def mount_cgroup(directory: Path) -> str:
    """Mount it, and create the directory; return a line with the result. Raises OSError."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if syscalls.filesystem_type(directory) == syscalls.CGROUP2_SUPER_MAGIC:
        return f"cgroup v2 is mounted on {directory} already"
    if directory.is_mount():
        raise OSError("another filesystem is mounted there: unmount it, or choose another directory")
    syscalls.mount("none", directory, "cgroup2")
    return f"mounted cgroup v2 on {directory}"
