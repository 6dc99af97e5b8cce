"""``hive mount-bpffs``: mounts the filesystem with pinned BPF maps and programs."""

from pathlib import Path

import click

from hive import syscalls
from hive.init.host import enter_host, host_option


@click.command()
@host_option
@click.argument("directory", type=click.Path(path_type=Path, readable=False), default="/sys/fs/bpf")
def command(directory: Path, host_process: Path | None) -> None:
    """Mount bpffs on DIRECTORY (/sys/fs/bpf), unless it is mounted there."""
    try:
        if host_process is not None:
            enter_host(host_process)
        click.echo(mount_bpffs(directory))
    except OSError as error:
        raise click.ClickException(f"bpffs is not mounted on {directory}: {error}") from error


def mount_bpffs(directory: Path) -> str:
    """Mount it; return a line with the result. Raises OSError."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if syscalls.filesystem_type(directory) == syscalls.BPF_FS_MAGIC:
        return f"bpffs is mounted on {directory} already"
    syscalls.mount("bpf", directory, "bpf", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    return f"mounted bpffs on {directory}"
