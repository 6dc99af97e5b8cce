"""Settings of the CNI configuration file, under Cilium's names.

Needs: nothing.   Gives: CniConfigSettings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from cells.cni.config.templates import TEMPLATES
from cells.config import ChainingMode
from cells.node.netlink import mac_text, parse_mac
from lifecycle import Settings, refuse

CHAINING_MODES = ("none", "aws-cni", "azure", "flannel", "generic-veth", "portmap")
MAC_MODES = ("", "random", "deterministic")


class CniConfigSettings(Settings, frozen=True):
    """The CNI configuration file for the container runtime."""

    write_cni_conf_when_ready: str = ""
    """Path of the CNI configuration file, written once pods can be added; empty: none."""

    read_cni_conf: str = ""
    """File whose contents are written there unchanged; empty: our own configuration."""

    cni_exclusive: bool = False
    """Rename the directory's other CNI configurations to *.cilium_bak, and put ours back when touched."""

    cni_chaining_mode: str = "none"
    """How the plugin is chained: none, portmap, flannel, or generic-veth with cni-chaining-target."""

    cni_chaining_target: str = ""
    """Name of the network in that directory to add our plugin to; *: the first one."""

    cni_log_file: str = "/var/run/cilium/cilium-cni.log"
    """Log file of the plugin, besides stderr."""

    cni_mac_addr_mode: str = ""
    """MAC addresses of pods: random, or deterministic, computed from namespace and name."""

    cni_fixed_mac: str = ""
    """MAC address of every pod; takes precedence over the mode."""

    cni_prefix_mac_map: str = ""
    """JSON object from pod name prefixes to MAC addresses; the longest match wins, over the mode too."""

    @property
    def chaining_mode(self) -> str:
        """The mode in force: a target alone means generic-veth."""
        mode = self.cni_chaining_mode.lower() or "none"
        return "generic-veth" if mode == "none" and self.cni_chaining_target else mode

    @property
    def makes_links(self) -> bool:
        """Whether pods' links are ours: no other plugin has made them."""
        return ChainingMode(self.chaining_mode).own_links

    @property
    def chaining_target(self) -> str:
        """The network our plugin is added to; the mode aws-cni has one of its own."""
        return self.cni_chaining_target or ("aws-cni" if self.chaining_mode == "aws-cni" else "")

    def mac_keys(self) -> dict[str, object]:
        """What the plugin's configuration says of MAC addresses: only what is set."""
        keys: dict[str, object] = {}
        if self.cni_mac_addr_mode:
            keys["macAddrMode"] = self.cni_mac_addr_mode
        if self.cni_fixed_mac:
            keys["fixedMac"] = mac_text(parse_mac(self.cni_fixed_mac))
        if self.cni_prefix_mac_map:
            pairs = _prefix_macs(self.cni_prefix_mac_map).items()
            keys["prefixMacMap"] = {prefix: mac_text(mac) for prefix, mac in pairs}
        return keys

    def validate(self) -> None:
        """Refuse what is not there or cannot work; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for name in ("write_cni_conf_when_ready", "read_cni_conf", "cni_log_file"):
            value: str = getattr(self, name)
            if value and not PurePosixPath(value).is_absolute():
                yield f"{name.replace('_', '-')}={value}: expected an absolute path, or nothing"
        if self.chaining_mode not in CHAINING_MODES:
            yield f"cni-chaining-mode={self.cni_chaining_mode}: expected one of {', '.join(CHAINING_MODES)}"
        elif self.chaining_mode not in TEMPLATES and not self.chaining_target and not self.read_cni_conf:
            yield (
                f"cni-chaining-mode={self.cni_chaining_mode}: set cni-chaining-target too, the network our"
                " plugin is added to"
            )
        if self.chaining_mode == "portmap" and self.chaining_target:
            yield (
                "cni-chaining-mode=portmap: leave cni-chaining-target out, since portmap comes behind our own"
                " link; expected generic-veth to have our plugin behind another one"
            )
        yield from self._wrong_macs()

    def _wrong_macs(self) -> Iterator[str]:
        if self.cni_mac_addr_mode not in MAC_MODES:
            yield f"cni-mac-addr-mode={self.cni_mac_addr_mode}: expected random, deterministic, or nothing"
        try:
            if self.cni_fixed_mac:
                _unicast("cni-fixed-mac", self.cni_fixed_mac)
        except ValueError as error:
            yield str(error)
        try:
            if self.cni_prefix_mac_map:
                _prefix_macs(self.cni_prefix_mac_map)
        except ValueError as error:
            yield str(error)


def _unicast(name: str, text: str) -> bytes:
    """A MAC an interface can have; raises ValueError."""
    try:
        mac = parse_mac(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: expected a MAC address such as aa:bb:cc:00:00:02") from error
    if mac[0] & 1 or mac == bytes(6):
        raise ValueError(f"{name}={text}: expected the address of one interface, not of a group, not zero")
    return mac


def _prefix_macs(text: str) -> Mapping[str, bytes]:
    given = f"cni-prefix-mac-map={text}"
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{given}: expected a JSON object: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{given}: expected a JSON object of prefixes and MAC addresses")
    return {prefix: _unicast(f"{given}: {prefix}", mac) for prefix, mac in found.items()}
