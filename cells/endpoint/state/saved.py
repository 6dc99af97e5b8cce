"""The format of an endpoint's saved state, ``ep_config.json``, with the keys that Cilium's agent expects.

Source: Cilium 1.17, pkg/endpoint/restore.go and serializableEndpoint. Cilium ignores unknown keys and
defaults missing ones.
"""

from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

from cells.base.addresses import text_of
from cells.base.labels import Label, labels_sha256, parse, texts
from cells.endpoint.model import ZERO_MAC, DatapathConfiguration, Endpoint, State

# DNS answers of an endpoint in its saved state: DNSHistory and DNSZombies.
#
# Source: Cilium 1.17, the DNS cache of an endpoint and its zombies, in ep_config.json.
#
# ``null`` is not written: Cilium's agent decodes it as a missing cache, and crashes.

_NEVER: Final = "0001-01-01T00:00:00Z"  # Go's zero time


class SavedLookup(msgspec.Struct, frozen=True, gc=False):
    """A DNS lookup: a name in any form and its addresses; times in Unix seconds."""

    name: str
    addresses: tuple[IPv4Address | IPv6Address, ...]
    ttl: int
    at: float
    expires: float


class SavedZombie(msgspec.Struct, frozen=True, gc=False):
    """A DNS zombie: an address with expired TTLs, its names, and the time of expiry in Unix seconds."""

    address: IPv4Address | IPv6Address
    names: tuple[str, ...]
    since: float


class SavedNames(msgspec.Struct, frozen=True, gc=False):
    """An endpoint's DNS cache: lookups and zombies."""

    lookups: tuple[SavedLookup, ...] = ()
    zombies: tuple[SavedZombie, ...] = ()


class _Lookup(msgspec.Struct, frozen=True, gc=False, rename="kebab", omit_defaults=True):
    fqdn: str = ""
    lookup_time: datetime | None = None
    expiration_time: datetime | None = None
    ttl: int = 0
    ips: list[str] | None = None


class _Zombie(msgspec.Struct, frozen=True, gc=False, rename="kebab"):
    names: list[str] | None = None
    ip: str = ""
    alive_at: str = _NEVER
    delete_pending_at: datetime | None = None


class _Zombies(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    deletes: dict[str, _Zombie] | None = None


class NamesJSON(msgspec.Struct, frozen=True, gc=False):
    """The JSON of the keys DNSHistory and DNSZombies."""

    history: bytes = b"[]"
    zombies: bytes = b"{}"

    @classmethod
    def found(cls, history: bytes, zombies: bytes) -> "NamesJSON":
        """Return the values read from a file; ``null`` becomes empty."""
        return cls(b"[]" if history == b"null" else history, b"{}" if zombies == b"null" else zombies)

    @classmethod
    def of(cls, names: SavedNames) -> "NamesJSON":
        """Encode the values to write."""
        lookups = [
            _Lookup(one.name, _time(one.at), _time(one.expires), one.ttl, list(map(str, one.addresses)))
            for one in names.lookups
        ]
        zombies = {
            str(one.address): _Zombie(list(one.names), str(one.address), delete_pending_at=_time(one.since))
            for one in names.zombies
        }
        return cls(msgspec.json.encode(lookups), msgspec.json.encode(_Zombies(zombies or None)))

    def read(self) -> SavedNames:
        """Decode both values. Raises ValueError if they are invalid."""
        try:
            history = msgspec.json.decode(self.history, type=list[_Lookup] | None) or []
            zombies = msgspec.json.decode(self.zombies, type=_Zombies | None) or _Zombies()
            return SavedNames(
                tuple(map(_lookup, history)),
                tuple(_zombie(address, one) for address, one in (zombies.deletes or {}).items()),
            )
        except (msgspec.DecodeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _lookup(one: _Lookup) -> SavedLookup:
    at = _seconds(one.lookup_time)
    expires = at + one.ttl if one.expiration_time is None else _seconds(one.expiration_time)
    return SavedLookup(one.fqdn, tuple(map(_address, one.ips or ())), one.ttl, at, expires)


def _zombie(address: str, one: _Zombie) -> SavedZombie:
    return SavedZombie(_address(one.ip or address), tuple(one.names or ()), _seconds(one.delete_pending_at))


def _address(text: str) -> IPv4Address | IPv6Address:
    if ":" not in text:
        return IPv4Address(text)
    found = IPv6Address(text)
    if found.scope_id is not None:
        raise ValueError(f'"{text}" is an address of one link')
    return found.ipv4_mapped or found  # Go also writes IPv4 addresses in this form


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(max(0.0, seconds), UTC)


def _seconds(time: datetime | None) -> float:
    return max(0.0, time.timestamp()) if time is not None and time.tzinfo is not None else 0.0


NO_NAMES: Final = NamesJSON()
CNI_NETWORK: Final = "property-cni-network"
"""A property of this agent only: the name of the endpoint's CNI network."""


class UnreadableError(Exception):
    """Raised for invalid saved state; the text has the reason."""


class _SavedLabel(msgspec.Struct, frozen=True, gc=False):
    key: str
    value: str = ""
    source: str = ""


_Labels = dict[str, _SavedLabel]


class _OpLabels(msgspec.Struct, frozen=True, gc=False, rename="pascal"):
    custom: _Labels | None = None
    orchestration_identity: _Labels | None = None
    disabled: _Labels | None = None
    orchestration_info: _Labels | None = None


class _SavedIdentity(msgspec.Struct, frozen=True, gc=False, rename={"labels_sha256": "labelsSHA256"}):
    id: int = 0
    labels: _Labels | None = None
    labels_sha256: str = ""


class _Datapath(msgspec.Struct, frozen=True, gc=False, rename="kebab", omit_defaults=True):
    require_arp_passthrough: bool | None = False
    require_egress_prog: bool | None = False
    external_ipam: bool | None = False
    require_routing: bool | None = None
    install_endpoint_route: bool | None = False
    disable_sip_verification: bool | None = False


_KEYS = {
    "id": "ID",
    "container_name": "ContainerName",
    "container_id": "dockerID",
    "if_name": "IfName",
    "if_index": "IfIndex",
    "container_if_name": "ContainerIfName",
    "disable_legacy_identifiers": "DisableLegacyIdentifiers",
    "op_labels": "OpLabels",
    "lxc_mac": "LXCMAC",
    "ipv6": "IPv6",
    "ipv6_pool": "IPv6IPAMPool",
    "ipv4": "IPv4",
    "ipv4_pool": "IPv4IPAMPool",
    "node_mac": "NodeMAC",
    "sec_label": "SecLabel",
    "k8s_pod_name": "K8sPodName",
    "k8s_namespace": "K8sNamespace",
    "k8s_uid": "K8sUID",
    "datapath": "DatapathConfiguration",
    "properties": "Properties",
    "netns_cookie": "NetnsCookie",
    "dns_history": "DNSHistory",
    "dns_zombies": "DNSZombies",
}
_NULL: Final = msgspec.Raw(b"null")


class _Saved(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename=_KEYS):
    id: int
    container_name: str = ""
    container_id: str = ""
    if_name: str = ""
    if_index: int = 0
    container_if_name: str = ""
    disable_legacy_identifiers: bool = False
    op_labels: _OpLabels | None = None
    lxc_mac: str = ""
    ipv6: str = ""
    ipv6_pool: str = ""
    ipv4: str = ""
    ipv4_pool: str = ""
    node_mac: str = ""
    sec_label: _SavedIdentity | None = None
    k8s_pod_name: str = ""
    k8s_namespace: str = ""
    k8s_uid: str = ""
    datapath: _Datapath | None = None
    properties: dict[str, object] | None = None
    netns_cookie: int = 0
    dns_history: msgspec.Raw = _NULL
    dns_zombies: msgspec.Raw = _NULL


# Keys of features that this agent does not have, with the values of an agent that does not use them.
_CONSTANT: Final = msgspec.json.encode(
    {
        "DockerNetworkID": "",
        "DockerEndpointID": "",
        "Options": {"map": {}},
        "DNSRules": None,
        "DNSRulesV2": None,
        "CiliumEndpointUID": "",
    }
)[1:]  # without the opening brace
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Saved)


class SavedEndpoint(msgspec.Struct, frozen=True):
    """The contents of a state directory: the endpoint, its properties and its DNS names."""

    endpoint: Endpoint
    properties: dict[str, object]
    names: NamesJSON = NO_NAMES
    """Its DNS names."""

    @property
    def is_fake(self) -> bool:
        """Whether it is a fake endpoint, without an interface."""
        return self.properties.get("property-fake-endpoint") is True


def encode(endpoint: Endpoint, names: NamesJSON = NO_NAMES) -> bytes:
    """Encode the endpoint and its DNS names as ep_config.json."""
    datapath = endpoint.datapath
    saved = _Saved(
        id=endpoint.id,
        container_name=endpoint.container_name,
        container_id=endpoint.container_id,
        if_name=endpoint.ifname,
        if_index=endpoint.ifindex,
        container_if_name=endpoint.container_ifname,
        disable_legacy_identifiers=endpoint.disable_legacy_identifiers,
        op_labels=_OpLabels(
            custom=_label_map(endpoint.custom_labels),
            orchestration_identity=_label_map(endpoint.pod_labels),
            disabled={},
            orchestration_info=_label_map(endpoint.info_labels),
        ),
        lxc_mac=endpoint.pod_mac.hex(":"),
        ipv6=text_of(endpoint.ipv6) if endpoint.ipv6 is not None else "",
        ipv6_pool=endpoint.ipv6_pool,
        ipv4=text_of(endpoint.ipv4) if endpoint.ipv4 is not None else "",
        ipv4_pool=endpoint.pool,
        node_mac=endpoint.host_mac.hex(":"),
        sec_label=_SavedIdentity(
            endpoint.identity, _label_map(endpoint.labels), labels_sha256(endpoint.labels)
        ),
        k8s_pod_name=endpoint.pod_name,
        k8s_namespace=endpoint.pod_namespace,
        k8s_uid=endpoint.pod_uid,
        datapath=_Datapath(
            datapath.require_arp_passthrough,
            datapath.require_egress_prog,
            datapath.external_ipam,
            datapath.require_routing,
            datapath.install_endpoint_route,
            datapath.disable_sip_verification,
        ),
        properties={CNI_NETWORK: endpoint.network} if endpoint.network else {},
        netns_cookie=endpoint.netns_cookie,
        dns_history=msgspec.Raw(names.history),
        dns_zombies=msgspec.Raw(names.zombies),
    )
    return _encoder.encode(saved)[:-1] + b"," + _CONSTANT


def decode(data: bytes, created: float) -> SavedEndpoint:
    """Decode an ep_config.json; the endpoint is in state restoring. Raises UnreadableError."""
    try:
        saved = _decoder.decode(data)
        names = NamesJSON.found(bytes(saved.dns_history), bytes(saved.dns_zombies))
        return SavedEndpoint(_endpoint(saved, created), saved.properties or {}, names)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableError(f"not an endpoint's state: {error}") from error


def _endpoint(saved: _Saved, created: float) -> Endpoint:
    if not 1 <= saved.id <= 65535:
        raise ValueError(f"ID is {saved.id}, expected 1 to 65535")
    op_labels = saved.op_labels or _OpLabels()
    identity = saved.sec_label or _SavedIdentity()
    own = op_labels.orchestration_identity or {}
    custom = {key: label for key, label in (op_labels.custom or {}).items() if key not in own}
    labels = {**custom, **own}
    datapath = saved.datapath or _Datapath()
    _check_width("IfIndex", saved.if_index, 31)
    _check_width("SecLabel", identity.id, 32)
    _check_width("NetnsCookie", saved.netns_cookie, 64)
    return Endpoint(
        id=saved.id,
        container_id=saved.container_id,
        container_ifname=saved.container_if_name,
        container_name=saved.container_name,
        ifname=saved.if_name,
        ifindex=saved.if_index,
        pod_mac=_mac(saved.lxc_mac),
        host_mac=_mac(saved.node_mac),
        ipv4=IPv4Address(saved.ipv4) if saved.ipv4 else None,
        pool=saved.ipv4_pool,
        ipv6=IPv6Address(saved.ipv6) if saved.ipv6 else None,
        ipv6_pool=saved.ipv6_pool,
        network=_network(saved.properties),
        identity=identity.id,
        labels=_texts(labels or identity.labels),
        info_labels=_texts(op_labels.orchestration_info),
        custom_labels=_texts(custom),
        pod_name=saved.k8s_pod_name,
        pod_namespace=saved.k8s_namespace,
        pod_uid=saved.k8s_uid,
        netns_cookie=saved.netns_cookie,
        disable_legacy_identifiers=saved.disable_legacy_identifiers,
        datapath=DatapathConfiguration(
            external_ipam=bool(datapath.external_ipam),
            require_arp_passthrough=bool(datapath.require_arp_passthrough),
            require_egress_prog=bool(datapath.require_egress_prog),
            require_routing=datapath.require_routing,
            install_endpoint_route=bool(datapath.install_endpoint_route),
            disable_sip_verification=bool(datapath.disable_sip_verification),
        ),
        state=State.RESTORING,
        created=created,
    )


def _check_width(key: str, number: int, bits: int) -> None:
    """Raise ValueError if a number exceeds its width in kernel structures and maps."""
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{key} is {number}, expected a number of {bits} bits")


def _network(properties: dict[str, object] | None) -> str:
    network = (properties or {}).get(CNI_NETWORK, "")
    return network if isinstance(network, str) else ""


@lru_cache(maxsize=1024)
def _label_map(labels: tuple[str, ...]) -> _Labels:
    """Return the labels by key, to write; cached, because similar pods have equal labels."""
    return {label.key: _SavedLabel(label.key, label.value, label.source) for label in map(parse, labels)}


def _texts(labels: _Labels | None) -> tuple[str, ...]:
    return texts(Label(label.source, label.key, label.value) for label in (labels or {}).values())


def _mac(text: str) -> bytes:
    if not text:
        return ZERO_MAC
    mac = bytes.fromhex(text.replace(":", ""))
    if len(mac) != 6:
        raise ValueError(f'"{text}" is not a MAC address')
    return mac
