"""Which addresses the router had before this start.

Needs: what the pinned maps say, the addresses on cilium_host, a file of the agent that ran here before, if it
was Cilium's.
Gives: remembered(), addresses_in().
Source: Cilium 1.17, restoring the router's addresses from globals/node_config.h below the state directory.
"""

import re
import sys
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from cells.ipam import IPAddress
from cells.maps import NodeConfig
from lifecycle import Logger
from lifecycle.settings import read_regular

FILE: Final = Path("globals", "node_config.h")
"""Below the directory of the endpoints' states. Only read: we have no such file ourselves."""

_RAW: Final = {"cilium.v4.internal.raw ": 4, "cilium.v6.internal.raw ": 6, " ROUTER_IP ": 6}
"""Markers before sixteen bytes in C, and the family of the address; an IPv4 address is the last four."""
_GATEWAY: Final = re.compile(r"#define IPV4_GATEWAY (0x[0-9a-fA-F]{1,8})\s*$")
_BYTE: Final = re.compile(r"0x[0-9a-fA-F]{1,2}")


def remembered(
    pinned: NodeConfig | None, on_device: Iterable[IPAddress], path: Path, log: Logger
) -> list[IPAddress]:
    """The address in the programs' maps, else that of cilium_host, else that in the file.

    The pinned maps come first: anyone may change the device, and the running pods use what the programs know.
    """
    known = (pinned.router_ip6, pinned.router_ip) if pinned is not None else ()
    found = [ip for ip in known if ip is not None]
    found += [ip for ip in on_device if ip not in found]
    try:
        text = read_regular(path).decode(errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        log.warning("Unable to read router IPs of an earlier agent", path=str(path), error=str(error))
        text = ""
    return found + [ip for ip in addresses_in(text) if ip not in found]


def addresses_in(text: str) -> list[IPAddress]:
    """The router's addresses of a node_config.h, at most one of each family; other lines do not count."""
    found: dict[int, IPAddress] = {}
    for line in text.splitlines():
        if (legacy := _GATEWAY.search(line)) is not None:
            # a number as the kernel's C reads it: its bytes in memory are the address
            found[4] = IPv4Address(int(legacy[1], 16).to_bytes(4, sys.byteorder))
        for marker, version in _RAW.items():
            if marker in line:
                data = bytes(int(each, 16) for each in _BYTE.findall(line.partition(marker)[2]))
                if len(data) == 16:
                    found[version] = IPv4Address(data[12:]) if version == 4 else IPv6Address(data)
    return [found[version] for version in (6, 4) if version in found and int(found[version])]
