"""The protocol of the plugin and the agent: packets on cni.sock, results and errors of the CNI."""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from types import TracebackType
from typing import Final

import msgspec

from cells.base.addresses import text_of
from cells.netlink.rows import mac_text

# Errors of CNI plugins and their codes.
#
# Source: CNI spec 1.1, section 5 "Error"; 100 is Cilium 1.17's; 999 is the CNI library's code of errors
#         without a code.

INCOMPATIBLE_VERSION: Final = 1
UNHEALTHY: Final = 1
"""Code of a failed CHECK. Cilium's plugin sends another error's number here; runtimes only compare it with 0.
"""
INVALID_ENVIRONMENT: Final = 4
DECODING_FAILURE: Final = 6
INVALID_CONFIG: Final = 7
TRY_AGAIN: Final = 11
NOT_AVAILABLE: Final = 50
HEALTH_UNKNOWN: Final = 100
INTERNAL: Final = 999
FALLBACK_VERSION: Final = "1.0.0"
"""The version of errors before the caller's version is known."""


class PluginAction(IntEnum):
    """The action that the plugin performs before it repeats the request. Values are those on cni.sock."""

    NONE = 0
    IPV6 = 1
    """Enable IPv6 in the pod's namespace."""
    ADDRESSES = 2
    """Call the delegated IPAM plugin for the pod's addresses."""
    PORTS = 3
    """Reserve the ports that follow ``stdout`` in the pod's namespace, then print ``stdout`` and exit."""


class CniError(Exception):
    """The error that the runtime gets instead of a result.

    With an ``action``, the plugin reports it only if it cannot perform the action.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = INTERNAL,
        details: str = "",
        action: PluginAction = PluginAction.NONE,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.details = details
        self.action = action


class ErrorContext:
    """A context manager that converts errors of one kind to a CniError, ``WHAT: ERROR``."""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: type[Exception], what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._kind):
            raise CniError(f"{self._what}: {error}") from error


def error_json(error: CniError, version: str) -> bytes:
    """Encode the error object of protocol ``version``."""
    body: dict[str, object] = {"cniVersion": version, "code": error.code, "msg": error.message}
    if error.details:
        body["details"] = error.details
    return msgspec.json.encode(body) + b"\n"


def kernel_reason(error: OSError) -> str:
    """Return the kernel's error text as Go's errno strings are: ``file exists``."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


# The packets on cni.sock.
#
# Source: cmd/cilium-cni/agent.h, the plugin's side. Little endian:
#
# request: ``HCNI`` | u16 version | u16 flags | u32 env_len | u32 stdin_len | env | stdin | addresses
# reply:   ``HCNI`` | u16 version | u16 action | u32 exit_code | u32 stdout_len | stdout | ports
#
# ``env`` contains every CNI_* variable as ``NAME=value\0``. With a pod namespace, the request carries two
# descriptors (SCM_RIGHTS): the namespace, and an rtnetlink socket opened in it. The plugin performs an action
# (see PluginAction) and then sends the request again. Flag 1: an agent died while it processed this request,
# so a partial attachment must be replaced. Flag 2: ``addresses`` is the result of the delegated IPAM plugin.
# Flag 4: the plugin supports action 3.

VERSION: Final = 1
ACCEPTED: Final = (VERSION,)
"""Accepted versions of the protocol: the plugin outlives an upgrade of the agent, so keep the previous one.
"""

MAX_PACKET: Final = 256 << 10
REPEATED: Final = 1
ADDRESSED: Final = 2
RESERVES_PORTS: Final = 4
_MAGIC: Final = b"HCNI"
_HEADER: Final = struct.Struct("<4sHHII")


class PluginRequest(msgspec.Struct, frozen=True):
    """A decoded request: the plugin's environment and stdin."""

    environment: dict[str, str]
    stdin: bytes
    repeated: bool = False
    """Whether the agent died while it processed this request."""
    addresses: bytes = b""
    """The result of the delegated IPAM plugin; empty before the plugin has called it."""
    reserves_ports: bool = False
    """Whether the plugin supports PluginAction.PORTS."""


def decode_request(packet: bytes | memoryview) -> PluginRequest:
    """Decode a request. Raises CniError for a malformed packet or an unsupported version.

    Invalid UTF-8 in the environment is replaced by U+FFFD, because results and state are JSON.
    """
    if len(packet) < _HEADER.size:
        raise CniError("malformed request on cni.sock: it is shorter than its header")
    magic, version, flags, env_length, stdin_length = _HEADER.unpack_from(packet)
    if magic != _MAGIC:
        raise CniError("malformed request on cni.sock: it does not start with HCNI")
    if version not in ACCEPTED:
        spoken = " and ".join(map(str, ACCEPTED))
        raise CniError(
            f"the plugin speaks version {version} of the cni.sock protocol, this agent {spoken}:"
            " install the plugin that came with the agent"
        )
    end = _HEADER.size + env_length + stdin_length
    if end > len(packet) or (end < len(packet) and not flags & ADDRESSED):
        raise CniError("malformed request on cni.sock: its lengths do not add up")
    start = _HEADER.size
    text = bytes(packet[start : start + env_length]).decode(errors="replace")
    variables = (entry.partition("=") for entry in text.split("\0") if entry)
    return PluginRequest(
        {name: value for name, _, value in variables},
        bytes(packet[start + env_length : end]),
        repeated=bool(flags & REPEATED),
        addresses=bytes(packet[end:]),
        reserves_ports=bool(flags & RESERVES_PORTS),
    )


def encode_reply(exit_code: int, stdout: bytes, action: PluginAction = PluginAction.NONE) -> bytes:
    """Encode a reply: the plugin prints ``stdout`` and exits, unless it performs the action."""
    return _HEADER.pack(_MAGIC, VERSION, action, exit_code, len(stdout)) + stdout


def encode_result(stdout: bytes, ports: str) -> bytes:
    """Encode a successful reply: the plugin reserves ``ports``, if any, and prints ``stdout``."""
    action = PluginAction.PORTS if ports else PluginAction.NONE
    return encode_reply(0, stdout, action) + ports.encode()


# The result of an ADD, in the requested version of the CNI specification.
#
# Source: CNI spec 0.2.0 (ip4, ip6), 0.3.1 (interfaces, ips with a version), 1.0.0 (ips without), 1.1.0
#         (routes with an MTU); as recorded.


class Attached(msgspec.Struct, frozen=True):
    """A new attachment, as the result of its ADD."""

    host_name: str
    host_mac: bytes
    ifname: str
    pod_mac: bytes
    netns: str
    addresses: tuple[IPv4Address | IPv6Address, ...]
    """The addresses; IPv6 first."""
    gateways: tuple[IPv4Address | IPv6Address, ...]
    """One gateway per address, in the same order."""
    mtu: int


def result_json(attached: Attached, version: str) -> bytes:
    """Encode the result object of protocol ``version``, a supported one."""
    legacy = version in {"0.1.0", "0.2.0"}
    by_family: dict[str, object] = {}
    ips: list[dict[str, object]] = []
    routes: list[dict[str, object]] = []
    for ip, router in zip(attached.addresses, attached.gateways, strict=True):
        four, gateway = ip.version == 4, text_of(router)
        bits = 32 if four else 128
        address = f"{text_of(ip)}/{bits}"
        default: dict[str, object] = {"dst": "0.0.0.0/0" if four else "::/0", "gw": gateway}
        if version == "1.1.0":
            default["mtu"] = attached.mtu
        own: list[dict[str, object]] = [{"dst": f"{gateway}/{bits}"}, default]
        if legacy:
            by_family["ip4" if four else "ip6"] = {"ip": address, "gateway": gateway, "routes": own}
            continue
        form: dict[str, object] = {"interface": 1, "address": address, "gateway": gateway}
        ips.append({"version": "4" if four else "6", **form} if version.startswith("0.") else form)
        routes += own
    if legacy:
        return msgspec.json.encode({"cniVersion": version, **by_family, "dns": {}}) + b"\n"
    result: dict[str, object] = {
        "cniVersion": version,
        "interfaces": [
            {"name": attached.host_name, "mac": mac_text(attached.host_mac)},
            {"name": attached.ifname, "mac": mac_text(attached.pod_mac), "sandbox": attached.netns},
        ],
        "ips": ips,
        "routes": routes,
    }
    if version.startswith("0."):
        result["dns"] = {}
    return msgspec.json.encode(result) + b"\n"


def chained_result(previous: bytes, version: str, mac: tuple[str, bytes] | None = None) -> bytes:
    """Return the previous plugin's result in protocol ``version``, otherwise unchanged.

    ``mac`` is the name of the pod's interface and its changed MAC address.
    """
    result: dict[str, object] = {**msgspec.json.decode(previous), "cniVersion": version}
    if version.startswith("0."):
        result.setdefault("dns", {})
    elif not result.get("dns"):
        result.pop("dns", None)
    interfaces = result.get("interfaces")
    if mac is not None and isinstance(interfaces, list):
        result["interfaces"] = [
            {**each, "mac": mac_text(mac[1])} if each.get("name") == mac[0] and each.get("sandbox") else each
            for each in interfaces
        ]
    return msgspec.json.encode(result) + b"\n"
