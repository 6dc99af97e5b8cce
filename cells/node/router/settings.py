"""Which kernel settings the way through cilium_host depends on.

For:    Router.   Needs: how settings are now.   Gives: router_settings(), router_settings6(), listening().
Source: Cilium 1.17; kernel Documentation/networking/ip-sysctl.rst.
"""

from collections.abc import Callable, Iterable

from cells.node.router.pair import HOST, NET


def router_settings() -> dict[str, str]:
    """Names and values: packets of pods come in on links that have no route back to them."""
    device_settings = {"rp_filter": "0", "forwarding": "1", "accept_local": "1", "send_redirects": "0"}
    return {"net/ipv4/conf/all/rp_filter": "0"} | {
        f"net/ipv4/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    }


def router_settings6() -> dict[str, str]:
    """Names and values for IPv6. Forwarding is a setting of the whole node; see :func:`listening`."""
    device_settings = {"disable_ipv6": "0", "accept_ra": "0", "forwarding": "1"}
    return {
        f"net/ipv6/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    } | {"net/ipv6/conf/all/forwarding": "1"}


def listening(devices: Iterable[str], read: Callable[[str], str | None]) -> dict[str, str]:
    """What must be written before IPv6 is forwarded, once: whether to listen on is for the node to say.

    Forwarding ends what routers have advertised to a device, the default route too, unless its accept_ra
    is 2: so that is what devices get that listen to routers so far.
    """
    return {f"net/ipv6/conf/{name}/accept_ra": "2" for name in devices if _listens(name, read)}


def _listens(device: str, read: Callable[[str], str | None]) -> bool:
    """Whether routers' advertisements change the device's addresses and routes now."""
    accepts, forwards = (read(f"net/ipv6/conf/{device}/{name}") for name in ("accept_ra", "forwarding"))
    return accepts == "1" and forwards == "0"
