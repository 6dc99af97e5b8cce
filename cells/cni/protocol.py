"""What plugin and agent exchange: packets on cni.sock, results and errors of the CNI."""

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

# The error a CNI plugin prints, and the codes it may carry.
#
# Source: CNI spec 1.1, section 5 "Error"; 100 is Cilium 1.17's, 999 what the CNI library makes of an error
#         without a code.

INCOMPATIBLE_VERSION: Final = 1
UNHEALTHY: Final = 1
"""Of a CHECK; Cilium sends the number of another error here, and readers only look whether it is zero."""
INVALID_ENVIRONMENT: Final = 4
DECODING_FAILURE: Final = 6
INVALID_CONFIG: Final = 7
TRY_AGAIN: Final = 11
NOT_AVAILABLE: Final = 50
HEALTH_UNKNOWN: Final = 100
INTERNAL: Final = 999
FALLBACK_VERSION: Final = "1.0.0"
"""For errors before the caller's version is known."""


class PluginAction(IntEnum):
    """What the plugin is to do before it calls again; the numbers are those of the protocol on cni.sock."""

    NONE = 0
    IPV6 = 1
    """Switch IPv6 on in the pod's namespace."""
    ADDRESSES = 2
    """Ask the delegated IPAM plugin for the pod's addresses."""
    PORTS = 3
    """Reserve the ports behind ``stdout`` in the pod's namespace, then print ``stdout``: all else is done."""


class CniError(Exception):
    """The error that the runtime gets instead of a result; raised wherever a call cannot go on.

    With a ``action`` the plugin names it only if it cannot fulfil that.
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
    """A context in which errors of this kind reach the runtime as a sentence: ``what``, and what they say."""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: type[Exception], what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._kind):
            raise CniError(f"{self._what}: {error}") from error


def error_json(error: CniError, version: str) -> bytes:
    """The error object, in protocol ``version``."""
    body: dict[str, object] = {"cniVersion": version, "code": error.code, "msg": error.message}
    if error.details:
        body["details"] = error.details
    return msgspec.json.encode(body) + b"\n"


def kernel_reason(error: OSError) -> str:
    """``file exists``: the kernel's word, spelt as the Go plugin spells it."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


# The packets on cni.sock.
#
# Source: cmd/cilium-cni/agent.h, which is the other side. Little endian:
#
# request: ``HCNI`` | u16 version | u16 flags | u32 env_len | u32 stdin_len | env | stdin | addresses
# reply:   ``HCNI`` | u16 version | u16 action | u32 exit_code | u32 stdout_len | stdout | ports
#
# ``env`` is every CNI_* variable as ``NAME=value\0``. With a pod namespace the request carries two
# descriptors (SCM_RIGHTS): the namespace, and an rtnetlink socket opened inside it. The plugin carries out
# an action (see PluginAction), if it can, and sends the request again. Flag 1: an agent died over
# this very request: what it left of the attachment is to be replaced. Flag 2: the rest of the packet is the
# result of the plugin that gives the addresses. Flag 4: the plugin knows action 3.

VERSION: Final = 1
ACCEPTED: Final = (VERSION,)
"""The present version and the one before, once there is one: the plugin outlives an agent's upgrade."""

MAX_PACKET: Final = 256 << 10
REPEATED: Final = 1
ADDRESSED: Final = 2
RESERVES_PORTS: Final = 4
_MAGIC: Final = b"HCNI"
_HEADER: Final = struct.Struct("<4sHHII")


class PluginRequest(msgspec.Struct, frozen=True):
    """A request as it came: the plugin's environment and stdin."""

    environment: dict[str, str]
    stdin: bytes
    repeated: bool = False
    """An agent died over this very request."""
    addresses: bytes = b""
    """The result of the delegated IPAM plugin; empty while it has not been called."""
    reserves_ports: bool = False
    """Whether the plugin reserves ports in the pod when the reply names some."""


def decode_request(packet: bytes | memoryview) -> PluginRequest:
    """The request in ``packet``; raises CniError when it is none, or of a version not spoken here.

    Bytes of the environment that are no UTF-8 are read as U+FFFD: results and state are JSON.
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
    """A reply that makes the plugin print ``stdout`` and exit, if it does not carry out the action."""
    return _HEADER.pack(_MAGIC, VERSION, action, exit_code, len(stdout)) + stdout


def encode_result(stdout: bytes, ports: str) -> bytes:
    """A reply that makes the plugin reserve ``ports``, where there are some, and print ``stdout``."""
    action = PluginAction.PORTS if ports else PluginAction.NONE
    return encode_reply(0, stdout, action) + ports.encode()


# The result of an ADD, in the form of the protocol version that was asked for.
#
# Source: CNI spec 0.2.0 (ip4, ip6), 0.3.1 (interfaces, ips with a version), 1.0.0 (ips without), 1.1.0
#         (routes with an MTU); as recorded.


class Attached(msgspec.Struct, frozen=True):
    """The result for the runtime of a new attachment."""

    host_name: str
    host_mac: bytes
    ifname: str
    pod_mac: bytes
    netns: str
    addresses: tuple[IPv4Address | IPv6Address, ...]
    """IPv6 first, where there are both."""
    gateways: tuple[IPv4Address | IPv6Address, ...]
    """One per address, in the same order."""
    mtu: int


def result_json(attached: Attached, version: str) -> bytes:
    """The result object in protocol ``version``, one of those the plugin serves."""
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


def passed_on(previous: bytes, version: str, mac: tuple[str, bytes] | None = None) -> bytes:
    """The result of the plugin before us as ours, in protocol ``version``, otherwise unchanged.

    ``mac``: the name of the pod's interface, and the MAC address it has now.
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
