"""The programs: their names, attach points, dispatchers and slots in hive_entry.

A *dispatcher* (bpf/dispatch.c) stays attached and tail-calls the *program* of the active generation
(bpf/datapath.c) in a slot of ``hive_entry``. The slots are those of bpf/lib/maps.h; a test compares them.
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


class AttachDirection(Enum):
    """The direction of packets at the attach point."""

    INGRESS = "ingress"
    EGRESS = "egress"


class AttachPoint(msgspec.Struct, frozen=True):
    """A hook of a kind of device; it has at most one dispatcher."""

    kind: DeviceKind
    direction: AttachDirection


class Program(msgspec.Struct, frozen=True):
    """A program of a generation."""

    name: str
    """Its function in the C source."""
    entry: int
    """Its slot in hive_entry or hive_l3_entry."""
    dispatcher: str = ""
    """The dispatcher that calls it; named like Cilium's program, for tools."""
    attached: tuple[AttachPoint, ...] = ()


def _at(direction: AttachDirection, *kinds: DeviceKind) -> tuple[AttachPoint, ...]:
    return tuple(AttachPoint(kind, direction) for kind in kinds)


PROGRAMS: Final = (
    Program(
        *("hive_from_pod", 0, "cil_from_container"),
        _at(AttachDirection.INGRESS, DeviceKind.POD_LINK, DeviceKind.CHAINED_POD_LINK),
    ),
    Program(
        "hive_to_host",
        1,
        "cil_to_host",
        _at(AttachDirection.INGRESS, DeviceKind.HOST_LINK, DeviceKind.NET_LINK),
    ),
    Program("hive_from_host", 2, "cil_from_host", _at(AttachDirection.EGRESS, DeviceKind.HOST_LINK)),
    Program("hive_from_device", 4, "cil_from_netdev", _at(AttachDirection.INGRESS, DeviceKind.NATIVE_DEVICE)),
    Program("hive_to_device", 5, "cil_to_netdev", _at(AttachDirection.EGRESS, DeviceKind.NATIVE_DEVICE)),
    Program("hive_to_pod", 3, "cil_to_container", _at(AttachDirection.EGRESS, DeviceKind.CHAINED_POD_LINK)),
    Program("hive_from_vxlan", 6, "cil_from_overlay", _at(AttachDirection.INGRESS, DeviceKind.TUNNEL)),
    Program("hive_to_vxlan", 7, "cil_to_overlay", _at(AttachDirection.EGRESS, DeviceKind.TUNNEL)),
)
L3_PROGRAMS: Final = (
    Program(
        *("hive_from_l3_device", 0, "cil_from_netdev_l3"),
        _at(AttachDirection.INGRESS, DeviceKind.NATIVE_L3_DEVICE),
    ),
    Program(
        *("hive_to_l3_device", 1, "cil_to_netdev_l3"),
        _at(AttachDirection.EGRESS, DeviceKind.NATIVE_L3_DEVICE),
    ),
)
"""Programs of devices without Ethernet headers (bpf/l3.c), with their slots in hive_l3_entry."""
ENTRIES: Final = MappingProxyType({program.name: program.entry for program in PROGRAMS})
"""Programs and their slots in hive_entry."""
L3_ENTRIES: Final = MappingProxyType({program.name: program.entry for program in L3_PROGRAMS})
"""Programs and their slots in hive_l3_entry."""
XDP_ENTRIES: Final = MappingProxyType({"hive_xdp": 0})
"""Programs (bpf/xdp.c) and their slots in hive_xdp_entry."""
XDP_DISPATCHER: Final = "cil_xdp_entry"
"""The dispatcher attached as XDP program."""
DISPATCHERS: Final = (
    *(program.dispatcher for program in (*PROGRAMS, *L3_PROGRAMS) if program.dispatcher),
    XDP_DISPATCHER,
)
"""All dispatchers."""

_ATTACHED: Final = {
    point: program.dispatcher for program in (*PROGRAMS, *L3_PROGRAMS) for point in program.attached
}


@cache
def at(kind: DeviceKind) -> tuple[str, str]:
    """Return the dispatchers at ingress and egress of a device; empty for none."""
    ingress, egress = (_ATTACHED.get(AttachPoint(kind, direction), "") for direction in AttachDirection)
    return ingress, egress


def pod_link(*, egress_prog: bool) -> DeviceKind:
    """Return the kind of a pod's link; ``egress_prog`` if policy is enforced at the link's egress."""
    return DeviceKind.CHAINED_POD_LINK if egress_prog else DeviceKind.POD_LINK
