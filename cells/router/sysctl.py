"""Kernel settings the datapath depends on.

Needs: /proc/sys.   Gives: router_settings(), router_settings6(), ensure().
Source: Cilium 1.17 for which; kernel Documentation/networking/ip-sysctl.rst.
"""

from collections.abc import Iterable
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


def router_settings6(devices: Iterable[str], root: Path | None = None) -> dict[str, str]:
    """Names and values for IPv6, in the order they must be written in.

    Forwarding is a setting of the whole node, and ends what routers have advertised to a device, the default
    route too, unless its accept_ra is 2: so that is what devices get that listen to routers so far.
    """
    root = root or default_root()
    listening = [name for name in devices if _listens(root / "net/ipv6/conf" / name)]
    device_settings = {"disable_ipv6": "0", "accept_ra": "0", "forwarding": "1"}
    return {
        **{f"net/ipv6/conf/{name}/accept_ra": "2" for name in listening},
        **{
            f"net/ipv6/conf/{device}/{name}": value
            for device in (HOST, NET)
            for name, value in device_settings.items()
        },
        "net/ipv6/conf/all/forwarding": "1",
    }


def _listens(device: Path) -> bool:
    """Whether routers' advertisements change the device's addresses and routes now."""
    try:
        accepts, forwards = (
            (device / name).read_text(encoding="ascii").strip() for name in ("accept_ra", "forwarding")
        )
    except FileNotFoundError:  # the device is gone, or has no IPv6
        return False
    return accepts == "1" and forwards == "0"


def default_root() -> Path:
    """Where the node's settings are."""
    return HOST_PROC if HOST_PROC.is_dir() else PROC


def ensure(settings: dict[str, str], root: Path | None = None) -> None:
    """Write those settings that differ. Raises HiveError, one line, for the first that cannot be."""
    root = root or default_root()
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
