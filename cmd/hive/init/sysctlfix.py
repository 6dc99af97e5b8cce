"""``hive sysctlfix``: prevents systemd from enabling the reverse path filter on our devices.

Source: Cilium 1.17, tools/sysctlfix. systemd applies its sysctl.d to each new device, and the filter drops
pods' packets; the last file in sorted order has precedence.
"""

from pathlib import Path

import click

from hive.init.host import enter_host, host_option
from hive.init.systemd import SystemdError, restart_unit

CONTENT = """
# The reverse path filter drops what comes over these devices. "-" forgives a device that is not there.
-net.ipv4.conf.lxc*.rp_filter = 0
-net.ipv4.conf.cilium_*.rp_filter = 0
# The kernel takes the greater of this and the device's own value.
net.ipv4.conf.all.rp_filter = 0
"""


@click.command()
@host_option
@click.option(
    "--sysctl-conf-dir", type=click.Path(path_type=Path), default="/etc/sysctl.d/", show_default=True
)
@click.option("--sysctl-config-file", default="99-zzz-override_cilium.conf", show_default=True)
@click.option("--systemd-sysctl-unit", default="systemd-sysctl.service", show_default=True)
def command(
    sysctl_conf_dir: Path, sysctl_config_file: str, systemd_sysctl_unit: str, host_process: Path | None
) -> None:
    """Write the node's sysctl settings for the agent's devices, and make systemd apply them.

    Errors are printed; the exit code is always 0: a node without systemd does not need this.
    """
    path = sysctl_conf_dir / sysctl_config_file
    try:
        if host_process is not None:
            enter_host(host_process)
        written = write_config(path)
    except OSError as error:
        click.echo(f"sysctl config not written to {path}: {error.strerror or error}")
        return
    if not written:
        click.echo("sysctl config up-to-date, nothing to do")
        return
    click.echo(f"sysctl config {written}: {path}")
    try:
        restarted = restart_unit(systemd_sysctl_unit)
    except SystemdError as error:
        click.echo(f"systemd unit '{systemd_sysctl_unit}' not restarted: {error}")
        return
    click.echo(
        f"systemd unit '{systemd_sysctl_unit}' restarted"
        if restarted
        else f"systemd unit '{systemd_sysctl_unit}' not found: nothing to restart"
    )


def write_config(path: Path) -> str:
    """Write CONTENT with mode 0644; return created, updated, or "" if unchanged. Raises OSError."""
    try:
        if path.read_text(encoding="utf-8", errors="replace") == CONTENT:
            return ""
        done = "updated"
    except FileNotFoundError:
        done = "created"
    path.write_text(CONTENT, encoding="utf-8")
    path.chmod(0o644)
    return done
