"""Decodes and validates a call of the plugin: environment, CNI_ARGS and network configuration.

Source: CNI spec 1.1 sections 2 and 5; error texts and codes as recorded from Cilium's plugin.
"""

from __future__ import annotations

import json
from ipaddress import ip_interface
from typing import Any, Final, TypeVar

import msgspec

from cells.base.addresses import IPAddress
from cells.cni.protocol import (
    DECODING_FAILURE,
    INCOMPATIBLE_VERSION,
    INVALID_CONFIG,
    CniError,
    PluginRequest,
)

SERVED_VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
_LOADING: Final = frozenset({"ADD", "DEL", "CHECK"})
"""Commands for which Cilium's plugin decodes the whole network configuration."""
_RESULT_VERSIONS: Final = (("", "0.1.0", "0.2.0"), ("0.3.0", "0.3.1", "0.4.0"), ("1.0.0", "1.1.0"))
"""The versions of each result type of the CNI library."""
CHAINING_MODES: Final = frozenset({"aws-cni", "azure", "flannel", "generic-veth"})
_IGNORE_UNKNOWN: Final = "IgnoreUnknown"
_KNOWN_ARGS: Final = frozenset({_IGNORE_UNKNOWN, "K8S_POD_NAME", "K8S_POD_NAMESPACE", "K8S_POD_UID"})
"""Fields of Cilium's ArgsSpec. Runtimes also send K8S_POD_INFRA_CONTAINER_ID, with IgnoreUnknown=1."""


class IpamConf(msgspec.Struct, frozen=True, gc=False):
    """``ipam`` of the network configuration."""

    type: str = ""


class ContainerInterface(msgspec.Struct, frozen=True):
    """A valid attachment of a GC."""

    container_id: str = msgspec.field(name="containerID")
    ifname: str


class RuntimeConf(msgspec.Struct, frozen=True, gc=False):
    """``runtimeConfig``: data from the runtime for plugins that declare the capability."""

    annotations: dict[str, str] | None = msgspec.field(default=None, name="io.kubernetes.cri.pod-annotations")
    """The pod's annotations, from containerd and CRI-O."""


class NetConf(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The network configuration on stdin; other keys are ignored."""

    cni_version: str = msgspec.field(default="0.1.0", name="cniVersion")
    name: str = ""
    chaining_mode: str = ""
    enable_route_mtu: bool = False
    """Set the MTU of the pod's routes in a chain."""
    ipam: IpamConf = IpamConf()
    prev_result: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="prevResult")
    mac_addr_mode: str = msgspec.field(default="", name="macAddrMode")
    fixed_mac: str = msgspec.field(default="", name="fixedMac")
    prefix_mac_map: dict[str, str] = msgspec.field(default_factory=dict, name="prefixMacMap")
    runtime_config: RuntimeConf = msgspec.field(default=RuntimeConf(), name="runtimeConfig")
    valid_attachments: list[ContainerInterface] | msgspec.UnsetType | None = msgspec.field(
        default=msgspec.UNSET, name="cni.dev/valid-attachments"
    )
    """The valid attachments of a GC; null is Go's encoding of an empty list."""

    @property
    def chain(self) -> str:
        """The chaining mode, configured or implied by the network's name; empty without chaining."""
        return self.chaining_mode or (self.name if self.name in CHAINING_MODES else "")


class PrevInterface(msgspec.Struct, frozen=True):
    """An interface of a result."""

    name: str = ""
    sandbox: str = ""


class PrevAddress(msgspec.Struct, frozen=True):
    """An address of a result, and the index of its interface."""

    address: str = ""
    interface: int | None = None


class PrevResult(msgspec.Struct, frozen=True):
    """The result of an ADD, which the runtime passes back from version 0.3.0 on."""

    interfaces: list[PrevInterface] | None = None
    ips: list[PrevAddress] | None = None
    routes: list[dict[str, Any]] | None = None
    code: int = 0
    """The code of an error that was passed as a result."""


class LegacyAddress(msgspec.Struct, frozen=True):
    """An address of a result before 0.3.0."""

    ip: str


class IpamResult(msgspec.Struct, frozen=True):
    """The result of a delegated IPAM plugin."""

    ips: list[PrevAddress] | None = None
    ip4: LegacyAddress | None = None
    ip6: LegacyAddress | None = None


class PluginCall(msgspec.Struct, frozen=True):
    """One invocation of the plugin."""

    command: str
    container_id: str
    ifname: str
    netns: str
    """Path of the pod's namespace, as the runtime names it; only copied to the result."""
    args: str
    conf: NetConf
    stdin: bytes
    repeated: bool = False
    """Whether an agent died while it processed this call, so that a partial attachment may be replaced."""
    addresses: bytes = b""
    """The result of the delegated IPAM plugin; empty before the plugin has called it."""
    reserves_ports: bool = False
    """Whether the plugin supports PluginAction.PORTS."""

    @property
    def attachment_id(self) -> str:
        """The attachment id, ``CONTAINER_ID:IFNAME``."""
        return f"{self.container_id}:{self.ifname}"


class PodReference(msgspec.Struct, frozen=True):
    """The pod of an attachment; all fields are empty outside Kubernetes."""

    name: str
    namespace: str
    uid: str

    @property
    def owner(self) -> str:
        """The owner of the addresses, ``NAMESPACE/NAME``."""
        return f"{self.namespace}/{self.name}"


_NETCONF: Final = msgspec.json.Decoder(NetConf)
_PREV_RESULT: Final = msgspec.json.Decoder(PrevResult | None)

T = TypeVar("T")


def _decode(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw) -> T:
    """Decode JSON as encoding/json does: null means absent. Raises MsgspecError, RecursionError."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        return decoder.decode(json.dumps(json.loads(bytes(text), object_pairs_hook=_without_nulls)))


def _without_nulls(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None}


def _read_conf(command: str, stdin: bytes) -> NetConf:
    try:
        return _decode(_NETCONF, stdin)
    except msgspec.ValidationError as error:
        if command in _LOADING:
            raise unparsable(command, stdin, str(error)) from error
        raise CniError(f"error unmarshall network config: {error}", code=DECODING_FAILURE) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CniError(f"error unmarshall network config: {error}", code=DECODING_FAILURE) from error


def unparsable(command: str, stdin: bytes, reason: str) -> CniError:
    """Return the error of a network configuration with values of a wrong type, in Cilium's words.

    CHECK has its own code, and does not escape the configuration.
    """
    text = stdin.decode(errors="replace")
    if command == "CHECK":
        details = f'unable to parse CNI configuration "{text}": {reason}'
        return CniError("InvalidNetworkConfig", code=INVALID_CONFIG, details=details)
    quoted = json.dumps(text, ensure_ascii=False)
    return CniError(f"unable to parse CNI configuration {quoted}: {reason}")


def read_call(packet: PluginRequest) -> PluginCall:
    """Decode the call in a packet; the plugin has validated the environment. Raises CniError.

    Invalid UTF-8 in the configuration is replaced by U+FFFD, as by encoding/json.
    """
    get = packet.environment.get
    command, stdin = get("CNI_COMMAND", ""), packet.stdin
    try:
        conf = _read_conf(command, stdin)
    except UnicodeDecodeError:
        stdin = stdin.decode(errors="replace").encode()
        conf = _read_conf(command, stdin)
    if not conf.cni_version:
        conf = msgspec.structs.replace(conf, cni_version=SERVED_VERSIONS[0])
    if conf.cni_version not in SERVED_VERSIONS:
        supported = " ".join(f'"{version}"' for version in SERVED_VERSIONS)
        raise CniError(
            "incompatible CNI versions",
            code=INCOMPATIBLE_VERSION,
            details=f'config is "{conf.cni_version}", plugin supports [{supported}]',
        )
    return PluginCall(
        command=command,
        container_id=get("CNI_CONTAINERID", ""),
        ifname=get("CNI_IFNAME", ""),
        netns=get("CNI_NETNS", ""),
        args=get("CNI_ARGS", ""),
        conf=conf,
        stdin=stdin,
        repeated=packet.repeated,
        addresses=packet.addresses,
        reserves_ports=packet.reserves_ports,
    )


def chain_of(conf: NetConf) -> str:
    """Return the chaining mode, or "" without chaining. Raises CniError for an unknown mode."""
    if conf.chain and conf.chain not in CHAINING_MODES:
        raise CniError(f"invalid chaining-mode {conf.chain}")
    return conf.chain


def check_add(call: PluginCall, *, delegated: bool) -> PrevResult | None:
    """Validate an ADD; return the previous plugin's result in a chain, else None.

    ``delegated``: another IPAM plugin assigns the addresses. A chaining mode without a previous result does
    not chain, because there is no link yet. Raises CniError.
    """
    conf = call.conf
    chain = chain_of(conf)
    previous = prev_result_of(call)
    if previous is not None and not chain:
        raise CniError(
            "CNI PrevResult supplied, but not in chaining mode -- this is invalid,"
            " please set chaining-mode in CNI configuration"
        )
    if previous is None and conf.ipam.type and not delegated:
        raise CniError(
            f"network configuration {conf.name}: ipam.type={conf.ipam.type}, and the agent's ipam is not"
            " delegated-plugin: remove the one, or set the other",
            code=INVALID_CONFIG,
        )
    return previous


def delegated_addresses(call: PluginCall) -> tuple[IPAddress, ...]:
    """Return the first address of each family from the delegated IPAM plugin, IPv6 first.

    Raises CniError.
    """
    try:
        result = msgspec.json.decode(call.addresses, type=IpamResult)
        texts = [each.address for each in result.ips or ()]
        texts += [each.ip for each in (result.ip6, result.ip4) if each is not None]
        found = [ip_interface(text).ip for text in texts]
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CniError(
            f"could not interpret delegated IPAM result for CNI version {call.conf.cni_version}: {error}"
        ) from error
    first = (next((ip for ip in found if ip.version == version), None) for version in (6, 4))
    return tuple(ip for ip in first if ip is not None)


def prev_result_of(call: PluginCall) -> PrevResult | None:
    """Return the previous result, or None without one. Raises CniError if it is invalid."""
    if not call.conf.prev_result:
        return None
    try:
        found: PrevResult | None = _decode(_PREV_RESULT, call.conf.prev_result)
        if found is not None and found.code:
            raise msgspec.ValidationError(_no_result(call.conf.cni_version))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise unparsable(call.command, call.stdin, f"could not parse prevResult: {error}") from error
    return found


def _no_result(version: str) -> str:
    """Return the CNI library's text for an error that was passed as a result of this version."""
    served = next(versions for versions in _RESULT_VERSIONS if version in versions)
    return f'result type supports [{" ".join(served)}] but unmarshalled CNIVersion is ""'


def pod_of(args: str) -> PodReference:
    """Parse the pod in CNI_ARGS (``K=V;K=V``). Raises CniError like the CNI library's LoadArgs."""
    values: dict[str, str] = {}
    unknown: list[str] = []
    ignores = False
    for pair in args.split(";") if args else ():
        key, equals, value = pair.partition("=")
        if not equals or "=" in value:
            raise CniError(f"unable to extract CNI arguments: ARGS: invalid pair {json.dumps(pair)}")
        if key not in _KNOWN_ARGS:
            unknown.append(pair)
            continue
        values[key] = value
        if key == _IGNORE_UNKNOWN:
            ignores = _is_true(pair, value.lower())
    if unknown and not ignores:
        shown = " ".join(map(json.dumps, unknown))
        raise CniError(f"unable to extract CNI arguments: ARGS: unknown args [{shown}]")
    return PodReference(
        values.get("K8S_POD_NAME", ""), values.get("K8S_POD_NAMESPACE", ""), values.get("K8S_POD_UID", "")
    )


def _is_true(pair: str, value: str) -> bool:
    if value in {"1", "true"}:
        return True
    if value in {"0", "false"}:
        return False
    raise CniError(
        f"unable to extract CNI arguments: ARGS: error parsing value of pair {json.dumps(pair)}:"
        f" boolean unmarshal error: invalid input {value}"
    )
