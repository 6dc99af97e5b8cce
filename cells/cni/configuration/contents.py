"""Contents of the CNI configuration file, and its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from cells.netlink.rows import mac_text, parse_mac
from lifecycle import Settings
from lifecycle.settings import read_regular

# Templates of the configuration.
#
# Source: Cilium 1.17, the CNI configuration manager's templates.

Plugin = dict[str, object]
"""One entry of ``plugins``."""

PORTMAP: Final[Plugin] = {"type": "portmap", "capabilities": {"portMappings": True}}
FLANNEL: Final[Plugin] = {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}}

TEMPLATES: Final[dict[str, tuple[str, Callable[[Plugin], list[Plugin]]]]] = {
    "none": ("cilium", lambda ours: [ours]),
    "portmap": ("portmap", lambda ours: [ours, PORTMAP]),
    "flannel": ("flannel", lambda ours: [FLANNEL, PORTMAP, ours]),
}
"""Name of the network and its plugins, by chaining mode. Other modes need a target."""


def conflist(mode: str, ours: Plugin) -> str:
    """Return the configuration of a mode with a template."""
    name, plugins = TEMPLATES[mode]
    if mode == "flannel":
        ours = {"type": ours["type"], "chaining-mode": mode, **ours}
    return json.dumps({"cniVersion": "0.3.1", "name": name, "plugins": plugins(ours)}, indent=2) + "\n"


# Insertion of our plugin into another network's configuration.
#
# Source: Cilium 1.17, the CNI configuration manager: chaining onto a target.

SUFFIXES: Final = (".conflist", ".conf", ".json", ".cilium_bak")
"""Suffixes of configurations; a network is still found after an exclusive agent has renamed its file."""

_BLANKS = " \t\r\n"
_decode = json.JSONDecoder().raw_decode


class NoTargetError(Exception):
    """The network's configuration does not exist yet."""

    def __init__(self) -> None:
        super().__init__(
            "could not find existing CNI config for chaining: no matching CNI configurations found"
            " (will retry)"
        )


def find_target(directory: Path, network: str, own: str, skipped: Callable[[str], None]) -> str:
    """Return the network's configuration as a conflist; ``*`` selects the first one.

    Files are searched in order of their names, except ``own``; ``skipped`` receives the error of each
    unreadable file. Raises NoTargetError, and OSError for the directory.
    """
    for path in sorted(directory.iterdir()):
        if path.name == own or path.suffix not in SUFFIXES:
            continue
        try:
            text = read_regular(path).decode()
            found = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            skipped(f"{path}: {error}")
            continue
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            continue
        if network not in {"*", found["name"]}:
            continue
        if isinstance(found.get("plugins"), list) and found["plugins"]:
            return text
        return json.dumps(_as_conflist(found, network), indent=2) + "\n"
    raise NoTargetError


def _as_conflist(single: dict[str, Any], network: str) -> dict[str, Any]:
    """Convert a configuration of one plugin to a conflist. For ``*`` it keeps its name."""
    name = single["name"] if network == "*" else network
    return {"name": name, "cniVersion": single.get("cniVersion", "0.3.1"), "plugins": [single]}


def splice(text: str, ours: Plugin) -> str:
    """Insert our plugin in place of an entry of its type, or at the end of the list.

    Other text is unchanged, byte for byte. ``text`` is a JSON object with a non-empty ``plugins``.
    """
    entry = json.dumps(ours)
    end = 0
    for begin, end, plugin in _plugins(text):
        if isinstance(plugin, dict) and plugin.get("type") == ours["type"]:
            return text[:begin] + entry + text[end:]
    return text[:end] + ", " + entry + text[end:]


def _plugins(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of each entry of ``plugins`` in the text."""
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        key, at = _decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        if key == "plugins":
            break
        _, at = _decode(text, at)
        at = _next(text, at)
    at = _skip(text, at + 1)
    while text[at] != "]":
        plugin, end = _decode(text, at)
        yield at, end, plugin
        at = _next(text, end)


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _next(text: str, at: int) -> int:
    """Skip a comma, if there is one."""
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at


# Settings of the CNI configuration file, under Cilium's names.

CHAINING_MODES = ("none", "aws-cni", "azure", "flannel", "generic-veth", "portmap")
MAC_MODES = ("", "random", "deterministic")


class CniConfigSettings(Settings, frozen=True):
    """Contents of the CNI configuration file."""

    read_cni_conf: str = ""
    """A file to copy unchanged; empty: generate the configuration."""

    cni_chaining_mode: str = "none"
    """Chaining mode: none, portmap, flannel, or generic-veth with cni-chaining-target."""

    cni_chaining_target: str = ""
    """Name of the network to add our plugin to, in the same directory; *: the first one."""

    cni_log_file: str = "/var/run/cilium/cilium-cni.log"
    """Log file of the plugin, besides stderr."""

    cni_mac_addr_mode: str = ""
    """MAC addresses of pods: random, or deterministic, derived from namespace and name."""

    cni_fixed_mac: str = ""
    """MAC address of every pod; takes precedence over the mode."""

    cni_prefix_mac_map: str = ""
    """JSON object of pod name prefixes and MAC addresses; the longest prefix applies, before the mode."""

    @property
    def chaining_mode(self) -> str:
        """The effective mode: a target alone means generic-veth."""
        mode = self.cni_chaining_mode.lower() or "none"
        return "generic-veth" if mode == "none" and self.cni_chaining_target else mode

    @property
    def chaining_target(self) -> str:
        """The network to add our plugin to; in mode aws-cni, by default ``aws-cni``."""
        return self.cni_chaining_target or ("aws-cni" if self.chaining_mode == "aws-cni" else "")

    def mac_keys(self) -> dict[str, object]:
        """Return the plugin's MAC address settings, without unset ones."""
        keys: dict[str, object] = {}
        if self.cni_mac_addr_mode:
            keys["macAddrMode"] = self.cni_mac_addr_mode
        if self.cni_fixed_mac:
            keys["fixedMac"] = mac_text(parse_mac(self.cni_fixed_mac))
        if self.cni_prefix_mac_map:
            pairs = _prefix_macs(self.cni_prefix_mac_map).items()
            keys["prefixMacMap"] = {prefix: mac_text(mac) for prefix, mac in pairs}
        return keys

    def faults(self) -> Iterator[str]:
        yield from relative("read-cni-conf", self.read_cni_conf)
        yield from relative("cni-log-file", self.cni_log_file)
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
        yield from self._mac_faults()

    def _mac_faults(self) -> Iterator[str]:
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


class CniConfigFileSettings(Settings, frozen=True):
    """Path of the CNI configuration file, and whether others are renamed."""

    write_cni_conf_when_ready: str = ""
    """Path of the CNI configuration file, written when the node can attach pods; empty: none."""

    cni_exclusive: bool = False
    """Rename other CNI configurations to *.cilium_bak, and restore ours after changes by others."""

    def faults(self) -> Iterable[str]:
        return relative("write-cni-conf-when-ready", self.write_cni_conf_when_ready)


def relative(option: str, path: str) -> Iterator[str]:
    """Yield an error if the path is relative."""
    if path and not PurePosixPath(path).is_absolute():
        yield f"{option}={path}: expected an absolute path, or nothing"


def _unicast(name: str, text: str) -> bytes:
    """Parse a unicast MAC address. Raises ValueError."""
    try:
        mac = parse_mac(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: expected a MAC address such as aa:bb:cc:00:00:02") from error
    if mac[0] & 1 or mac == bytes(6):
        raise ValueError(f"{name}={text}: expected a unicast MAC address other than zero")
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


POD_ANNOTATIONS: Final = {"io.kubernetes.cri.pod-annotations": True}
"""Capability for which containerd and CRI-O pass the pod's annotations; one may set the MAC address."""

DEFAULT_SOCKET: Final = Path("/var/run/cilium/cni.sock")


class ConfigurationContents:
    """Generates the file's contents from the settings."""

    def __init__(self, settings: CniConfigSettings, socket: Path, *, debug: bool = False) -> None:
        self._settings = settings
        self._socket = socket
        self._debug = debug

    def plugin(self) -> Plugin:
        """Return our plugin's entry; the socket only if it is not the plugin's default."""
        settings, chained = self._settings, bool(self._settings.chaining_target)
        plugin: Plugin = {"type": "cilium-cni"}
        if chained:
            plugin["chaining-mode"] = settings.chaining_mode
        plugin |= {"enable-debug": self._debug, "log-file": settings.cni_log_file}
        if not chained and settings.chaining_mode != "flannel":  # a chained plugin makes no interface
            plugin |= settings.mac_keys()
            if settings.mac_keys():
                plugin["capabilities"] = POD_ANNOTATIONS
        if self._socket != DEFAULT_SOCKET:
            plugin["agent-socket"] = str(self._socket)
        return plugin

    def read(self, own: Path, skipped: Callable[[str], None]) -> bytes:
        """Return the contents of the file ``own``. Raises OSError, NoTargetError.

        ``skipped`` receives the error of each other configuration that cannot be read.
        """
        settings = self._settings
        if settings.read_cni_conf:
            return read_regular(settings.read_cni_conf)
        if not settings.chaining_target:
            return conflist(settings.chaining_mode, self.plugin()).encode()
        target = find_target(own.parent, settings.chaining_target, own.name, skipped)
        return splice(target, self.plugin()).encode()
