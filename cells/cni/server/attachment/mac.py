"""Which MAC addresses a new pod's interface and its other end get.

Needs: the network configuration and the pod's name.   Gives: MacPair, macs_of, annotated_mac.
The pod's end: what its annotation says, else the fixed address, else that of the longest prefix of its name,
else the mode. The node's end is random, or, in the mode deterministic, derived with a salt.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Final, NamedTuple

from cells.cni.server.protocol.errors import CniError
from cells.cni.server.protocol.request import NetConf, Pod
from cells.node.netlink import parse_mac, random_mac

ANNOTATION: Final = "cni.cilium.io/mac-address"
MODES: Final = ("", "random", "deterministic")
_FIRST_INTERFACE: Final = "eth0"


class MacPair(NamedTuple):
    """Both ends of a link."""

    pod: bytes
    host: bytes


def macs_of(conf: NetConf, pod: Pod, ifname: str) -> MacPair:
    """The addresses for this pod's interface; raises CniError for a value no interface can have.

    Every value of the configuration is checked, not only the one that is used. An unknown mode is
    random: ``conf.mac_addr_mode not in MODES`` tells.
    """
    chosen = list(_chosen(conf, pod, ifname))
    if conf.mac_addr_mode == "deterministic" and pod.name:
        seed = pod.owner if ifname == _FIRST_INTERFACE else f"{pod.owner}/{ifname}"
        host_seed = f"{pod.owner}/host" if ifname == _FIRST_INTERFACE else f"{pod.owner}/host/{ifname}"
        return MacPair(chosen[0] if chosen else _derived(seed), _derived(host_seed))
    return MacPair(chosen[0] if chosen else random_mac(), random_mac())


def annotated_mac(conf: NetConf, ifname: str) -> bytes | None:
    """What the pod's annotation asks for, if it does; raises CniError for what no interface can have."""
    annotated = (conf.runtime_config.annotations or {}).get(ANNOTATION)
    return _unicast(annotated, ifname, f"pod annotation {ANNOTATION}") if annotated else None


def _chosen(conf: NetConf, pod: Pod, ifname: str) -> Iterator[bytes]:
    """What is said for this pod, most important first."""
    annotated = annotated_mac(conf, ifname)
    if annotated is not None:
        yield annotated
    if conf.fixed_mac:
        yield _unicast(conf.fixed_mac, ifname, "fixedMac")
    if conf.prefix_mac_map:
        macs = {
            prefix: _unicast(mac, ifname, f"prefixMacMap {prefix}")
            for prefix, mac in conf.prefix_mac_map.items()
        }
        matching = [prefix for prefix in macs if pod.name.startswith(prefix)]
        if matching:
            yield macs[max(matching, key=len)]


def _unicast(text: str, ifname: str, source: str) -> bytes:
    """The address of one interface; not of a group, not zero."""
    try:
        mac = parse_mac(text)
    except ValueError as error:
        raise _invalid(text, ifname, f"{source}: {error}") from error
    if mac[0] & 1 or mac == bytes(6):
        raise _invalid(text, ifname, f"{source}: it is not the address of one interface")
    return mac


def _invalid(text: str, ifname: str, details: str) -> CniError:
    message = f"unable to set MAC address on interface {ifname}: address {text}: invalid MAC address"
    return CniError(message, details=details)


def _derived(seed: str) -> bytes:
    """A locally administered unicast address, the same for the same seed on every node."""
    digest = sha256(seed.encode()).digest()
    return bytes(((digest[0] | 0x02) & 0xFE,)) + digest[1:6]
