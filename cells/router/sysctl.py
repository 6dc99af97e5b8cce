"""Kernel settings the datapath depends on.

Needs: /proc/sys.   Gives: router_settings(), ensure().
Source: Cilium 1.17 for which; kernel Documentation/networking/ip-sysctl.rst.
"""

from pathlib import Path

from cells.router.pair import HOST, NET
from lifecycle import HiveError

PROC = Path("/proc/sys")
HOST_PROC = Path("/host/proc/sys")
"""Where a container that is not privileged has the node's mounted: its own is read-only."""


def router_settings() -> dict[str, str]:
    """Names and values: packets of pods come in on links that have no route back to them."""
    device_settings = {"rp_filter": "0", "forwarding": "1", "accept_local": "1", "send_redirects": "0"}
    return {"net/ipv4/conf/all/rp_filter": "0"} | {
        f"net/ipv4/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    }


def ensure(settings: dict[str, str], root: Path | None = None) -> None:
    """Write those settings that differ. Raises HiveError, one line, for the first that cannot be."""
    root = root or (HOST_PROC if HOST_PROC.is_dir() else PROC)
    for name, value in settings.items():
        path = root / name
        try:
            if path.read_text(encoding="ascii").strip() != value:
                path.write_text(value, encoding="ascii")
        except OSError as error:
            raise HiveError(
                f"cannot set {name.replace('/', '.')}={value}: {error.strerror}; "
                f"make {root} writable for the agent, or set it on the node"
            ) from error
