"""The maps of the host address sync, in the kernel.

Needs: Maps.   Gives: KernelHostMaps, host_maps().
"""

from ipaddress import IPv4Address, IPv4Network

from cells.host_ip_sync.sync import HostMaps
from cells.maps import LXC_HOST, IpcacheKey, IpcacheValue, LxcKey, LxcValue, Maps

_HOST = LxcValue(flags=LXC_HOST).pack()


class KernelHostMaps:
    """The real :class:`~cells.host_ip_sync.sync.HostMaps`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def local(self) -> dict[IPv4Address, bool]:
        """Rows of cilium_lxc."""
        rows = ((LxcKey.unpack(key).ip, value) for key, value in self._maps.lxc.items())
        return {ip: LxcValue.unpack(value).is_host for ip, value in rows if isinstance(ip, IPv4Address)}

    def put_host(self, ip: IPv4Address) -> None:
        """All zero but the flag."""
        self._maps.lxc.update(LxcKey(ip).pack(), _HOST)

    def drop_host(self, ip: IPv4Address) -> None:
        """Gone already is fine."""
        self._maps.lxc.delete(LxcKey(ip).pack())

    def identity(self, prefix: IPv4Network) -> int | None:
        """A lookup finds the longest prefix that covers this one: what the datapath would find."""
        found = self._maps.ipcache.lookup(IpcacheKey.of(prefix).pack())
        if found is None:
            return None
        value = IpcacheValue.unpack(found)
        return value.identity if value == IpcacheValue(value.identity) else None

    def put_identity(self, prefix: IPv4Network, identity: int) -> None:
        """Without a tunnel."""
        self._maps.ipcache.update(IpcacheKey.of(prefix).pack(), IpcacheValue(identity).pack())

    def drop_identity(self, prefix: IPv4Network) -> None:
        """Gone already is fine."""
        self._maps.ipcache.delete(IpcacheKey.of(prefix).pack())


def host_maps(maps: Maps) -> HostMaps:
    """The node's maps, as the sync looks at them."""
    return KernelHostMaps(maps)
