"""The programs: what each is called, where it is attached, and where it is entered.

The numbers of entries are those of bpf/lib/maps.h; a test compares them.

A *dispatcher* (bpf/dispatch.c) is attached and stays; it jumps to the *program* of the generation in force
(bpf/datapath.c), which is in an entry of ``hive_entry``. A program without a dispatcher is reached from
another one only: it is a tail call.
"""

from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Final

import msgspec


class DeviceKind(Enum):
    """A kind of network device, seen from the host."""

    POD_LINK = "the host's end of a pod's link"
    CHAINED_POD_LINK = "the host's end of a pod's link that another plugin made"
    HOST_LINK = "cilium_host"
    NET_LINK = "cilium_net"
    TUNNEL = "cilium_vxlan or cilium_geneve"
    NATIVE_DEVICE = "a device that packets leave the node through"
    NATIVE_L3_DEVICE = "one of those without Ethernet headers"


class Side(Enum):
    """Which way packets pass the device where the program sees them."""

    INGRESS = "ingress"
    EGRESS = "egress"


class AttachPoint(msgspec.Struct, frozen=True):
    """Where a dispatcher is attached; there is one at most for each."""

    place: DeviceKind
    side: Side


class Program(msgspec.Struct, frozen=True):
    """One program of a generation."""

    name: str
    """In the object."""
    entry: int
    """Its index in hive_entry, or hive_l3_entry."""
    dispatcher: str = ""
    """What jumps to it from a device, under the name that tools look for."""
    attached: tuple[AttachPoint, ...] = ()


def _at(side: Side, *places: DeviceKind) -> tuple[AttachPoint, ...]:
    return tuple(AttachPoint(place, side) for place in places)


PROGRAMS: Final = (
    Program(
        *("hive_from_pod", 0, "cil_from_container"),
        _at(Side.INGRESS, DeviceKind.POD_LINK, DeviceKind.CHAINED_POD_LINK),
    ),
    Program("hive_to_host", 1, "cil_to_host", _at(Side.INGRESS, DeviceKind.HOST_LINK, DeviceKind.NET_LINK)),
    Program("hive_from_host", 2, "cil_from_host", _at(Side.EGRESS, DeviceKind.HOST_LINK)),
    Program("hive_from_device", 4, "cil_from_netdev", _at(Side.INGRESS, DeviceKind.NATIVE_DEVICE)),
    Program("hive_to_device", 5, "cil_to_netdev", _at(Side.EGRESS, DeviceKind.NATIVE_DEVICE)),
    Program("hive_to_pod", 3, "cil_to_container", _at(Side.EGRESS, DeviceKind.CHAINED_POD_LINK)),
    Program("hive_from_vxlan", 6, "cil_from_overlay", _at(Side.INGRESS, DeviceKind.TUNNEL)),
    Program("hive_to_vxlan", 7, "cil_to_overlay", _at(Side.EGRESS, DeviceKind.TUNNEL)),
)
L3_PROGRAMS: Final = (
    Program(
        *("hive_from_l3_device", 0, "cil_from_netdev_l3"), _at(Side.INGRESS, DeviceKind.NATIVE_L3_DEVICE)
    ),
    Program(*("hive_to_l3_device", 1, "cil_to_netdev_l3"), _at(Side.EGRESS, DeviceKind.NATIVE_L3_DEVICE)),
)
"""Those of devices with packets that begin with the network header (bpf/l3.c), in hive_l3_entry."""
ENTRIES: Final = MappingProxyType({program.name: program.entry for program in PROGRAMS})
"""Programs of an object and their entries."""
L3_ENTRIES: Final = MappingProxyType({program.name: program.entry for program in L3_PROGRAMS})
"""The same of devices without Ethernet headers."""
XDP_ENTRIES: Final = MappingProxyType({"hive_xdp": 0})
"""The same of the programs in devices' drivers (bpf/xdp.c), with their entries in hive_xdp_entry."""
XDP_DISPATCHER: Final = "cil_xdp_entry"
"""What is attached in drivers."""
DISPATCHERS: Final = (
    *(program.dispatcher for program in (*PROGRAMS, *L3_PROGRAMS) if program.dispatcher),
    XDP_DISPATCHER,
)
"""What is attached to devices."""

_ATTACHED: Final = {
    point: program.dispatcher for program in (*PROGRAMS, *L3_PROGRAMS) for point in program.attached
}


@cache
def at(place: DeviceKind) -> tuple[str, str]:
    """The dispatchers at ingress and at egress of a device; empty where there is none."""
    ingress, egress = (_ATTACHED.get(AttachPoint(place, side), "") for side in Side)
    return ingress, egress


def pod_link(*, egress_prog: bool) -> DeviceKind:
    """Which kind a pod's link is. ``egress_prog``: what comes to it by the link is seen there, not before."""
    return DeviceKind.CHAINED_POD_LINK if egress_prog else DeviceKind.POD_LINK
