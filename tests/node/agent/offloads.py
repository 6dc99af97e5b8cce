"""Switches offloads of a link off and on with ethtool."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from pathlib import Path

from cells.datapath.build import compile_one, find_clang
from hive.lab.node import Lab
from tests.node.agent.node_ports import (
    command,
)

SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


def set_feature(device: str, feature: int, on: int) -> None:
    """Set a feature as ethtool does (linux/ethtool.h, struct ethtool_value)."""
    value = ctypes.create_string_buffer(struct.pack("=II", feature, on))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sP", device.encode(), ctypes.addressof(value)).ljust(40, b"\0")
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def like_a_wire(lab: Lab, folder: Path) -> None:
    """Set up the peer of the node's device: it writes checksums, and receives XDP_TX frames."""
    source = Path(__file__).with_name("wire.c")
    program = compile_one(find_clang(), source, folder / "wire.o")
    with lab.open_outside() as outside:
        outside.run(set_feature, "node", ETHTOOL_STXCSUM, 0)
        outside.run(command, f"link set dev node xdpdrv obj {program} sec xdp")
        outside.run(remove_folders_of_iproute2)


def remove_folders_of_iproute2() -> None:
    """Remove the bpffs folders that iproute2 creates for any object, even one without pins."""
    bpffs = Path("/sys/fs/bpf")
    for link in ("ip", "xdp"):
        (bpffs / link).unlink()
    (bpffs / "tc" / "globals").rmdir()
    (bpffs / "tc").rmdir()
