"""The maps of the host address sync, in the kernel.

Needs: Maps.   Gives: KernelHostMaps, host_maps().
"""

from cells.host_ip_sync.sync import HostMaps
from cells.ipam import IPAddress, IPNetwork
from cells.maps import LXC_HOST, IpcacheKey, IpcacheValue, LxcKey, LxcValue, Maps

_HOST = LxcValue(flags=LXC_HOST).pack()


class KernelHostMaps:
    """The real :class:`~cells.host_ip_sync.sync.HostMaps`.

    After every write the datapath's remembered verdicts are void: a new row, too, may take a flow from an
    identity it had by a shorter prefix.
    """

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def local(self) -> dict[IPAddress, bool]:
        """Rows of cilium_lxc."""
        return {
            LxcKey.unpack(key).ip: LxcValue.unpack(value).is_host for key, value in self._maps.lxc.items()
        }

    def put_host(self, ip: IPAddress) -> None:
        """All zero but the flag."""
        self._maps.lxc.update(LxcKey(ip).pack(), _HOST)
        self._maps.epochs.bump()

    def drop_host(self, ip: IPAddress) -> None:
        """Gone already is fine."""
        self._maps.lxc.delete(LxcKey(ip).pack())
        self._maps.epochs.bump()

    def identity(self, prefix: IPNetwork) -> int | None:
        """A lookup finds the longest prefix that covers this one: what the datapath would find."""
        found = self._maps.ipcache.lookup(IpcacheKey.of(prefix).pack())
        if found is None:
            return None
        value = IpcacheValue.unpack(found)
        return value.identity if value == IpcacheValue(value.identity) else None

    def put_identity(self, prefix: IPNetwork, identity: int) -> None:
        """Without a tunnel."""
        self._maps.ipcache.update(IpcacheKey.of(prefix).pack(), IpcacheValue(identity).pack())
        self._maps.epochs.bump()

    def drop_identity(self, prefix: IPNetwork) -> None:
        """Gone already is fine."""
        self._maps.ipcache.delete(IpcacheKey.of(prefix).pack())
        self._maps.epochs.bump()


def host_maps(maps: Maps) -> HostMaps:
    """The node's maps, as the sync looks at them."""
    return KernelHostMaps(maps)
