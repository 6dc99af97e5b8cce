"""``hive cni``: installs the plugin for the container runtime, and removes its configuration.

Source: Cilium 1.17, install-plugin.sh and cni-uninstall.sh: same names, environment and output.
"""

import shutil
from pathlib import Path

import click

PLUGIN = Path(__file__).parents[1] / "bin" / "cilium-cni"
LOOPBACK = Path("/cni/loopback")

host_prefix = click.option(
    "--host-prefix",
    envvar="HOST_PREFIX",
    type=click.Path(path_type=Path),
    default="/",
    show_default=True,
    help="Path of the node's root: / on the node itself; the image sets HOST_PREFIX=/host.",
)


@click.group()
def command() -> None:
    """Install the CNI plugin on a node, or remove its configuration."""


@command.command()
@host_prefix
@click.option(
    "--cni-dir",
    envvar="CNI_DIR",
    type=click.Path(path_type=Path),
    help="The runtime's CNI directory; plugins go into its bin. Default: HOST_PREFIX/opt/cni. [CNI_DIR]",
)
@click.option(
    "--overwrite-cilium",
    envvar="OVERWRITE_CILIUM",
    type=bool,
    default=True,
    show_default=True,
    help="Replace an existing plugin. [OVERWRITE_CILIUM]",
)
@click.option(
    "--overwrite-loopback",
    envvar="OVERWRITE_LOOPBACK",
    type=bool,
    default=False,
    show_default=True,
    help="Replace an existing loopback plugin. [OVERWRITE_LOOPBACK]",
)
def install(
    host_prefix: Path, cni_dir: Path | None, overwrite_cilium: bool, overwrite_loopback: bool
) -> None:
    """Install cilium-cni, and loopback if the image has one.

    Files are replaced atomically; a running plugin continues with the old file.
    """
    directory = (cni_dir or host_prefix / "opt/cni") / "bin"
    if LOOPBACK.exists():
        try:
            put(LOOPBACK, directory / "loopback", overwrite=overwrite_loopback)
        except OSError as error:
            click.echo(f"hive: loopback not installed: {error}", err=True)
    try:
        put(PLUGIN, directory / "cilium-cni", overwrite=overwrite_cilium)
    except OSError as error:
        raise click.ClickException(f"cilium-cni not installed: {error}") from error


def put(source: Path, destination: Path, *, overwrite: bool) -> None:
    """Copy an executable to its destination atomically. Raises OSError."""
    if destination.exists() and not overwrite:
        click.echo(f"{destination} is there already")
        return
    click.echo(f"Installing {source.name} to {destination.parent} ...")
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = destination.with_name(f".{destination.name}.new")
    try:
        shutil.copyfile(source, fresh)
        fresh.chmod(0o755)
        fresh.replace(destination)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    click.echo(f"Wrote {destination}")


@command.command()
@host_prefix
@click.option(
    "--config-dir",
    type=click.Path(path_type=Path),
    default="/tmp/cilium/config-map",  # noqa: S108  # where the init container wrote it
    show_default=True,
    help="The agent's config-dir; its setting cni-uninstall decides.",
)
@click.option(
    "--custom-conf",
    envvar="CILIUM_CUSTOM_CNI_CONF",
    type=bool,
    default=False,
    help="The CNI configuration is managed by the administrator: keep it. [CILIUM_CUSTOM_CNI_CONF]",
)
def uninstall(host_prefix: Path, config_dir: Path, custom_conf: bool) -> None:
    """Remove our CNI configuration from the node, if the setting cni-uninstall is true.

    Configurations renamed to *.cilium_bak and the plugin itself stay, since pods must still be deleted.
    """
    if _content(config_dir / "cni-uninstall") != "true":
        click.echo("cni-uninstall disabled, not removing CNI configuration")
        return
    if custom_conf:
        click.echo("the CNI configuration is a custom one, not removing it")
        return
    directory = host_prefix / "etc/cni/net.d"
    for path in sorted(directory.glob("*cilium*")) if directory.is_dir() else []:
        if path.suffix in {".conf", ".conflist"} and path.is_file():
            try:
                path.unlink()
            except OSError as error:
                raise click.ClickException(f"{path} not removed: {error}") from error
            click.echo(f"Removed {path}")


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
