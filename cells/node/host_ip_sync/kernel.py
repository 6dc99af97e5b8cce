"""The rows of cilium_lxc that stand for the node itself, in the kernel.

Needs: Maps.   Gives: KernelHostMaps, host_maps().
"""

from cells.ipam import IPAddress
from cells.maps import LXC_HOST, LxcKey, LxcValue, Maps
from cells.node.host_ip_sync.sync import HostMaps

_HOST = LxcValue(flags=LXC_HOST).pack()


class KernelHostMaps:
    """The real :class:`~cells.node.host_ip_sync.sync.HostMaps`.

    After every write the datapath's remembered verdicts are void: a flow to the address goes elsewhere now.
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


def host_maps(maps: Maps) -> HostMaps:
    """The node's map of local addresses, as the sync looks at it."""
    return KernelHostMaps(maps)
