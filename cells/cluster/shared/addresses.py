"""Addresses of pods told through the store: what a key says, and what is to be said of an endpoint.

For:    SharedAddresses. Needs: values. Gives: SharedAddress, read_address(), address_keys().
Source: Cilium 1.17, IPIdentityPair as JSON, below ip/v1/default/: an address, or a prefix, is the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, ip_address, ip_network

import msgspec
from msgspec import UNSET, UnsetType

from cells.cluster.ipcache import IpcacheEntry, Prefix, Source
from cells.cluster.kvstore import IPS, OwnKey
from cells.endpoint import Endpoint
from cells.ipam import IPAddress


class NamedPort(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """A port of a pod, by name."""

    name: str = ""
    port: int = 0
    protocol: str = ""


class Pair(msgspec.Struct, frozen=True, rename="pascal"):
    """The value of an address."""

    ip: str = msgspec.field(name="IP", default="")
    mask: bytes | None = None
    host_ip: str | None = msgspec.field(name="HostIP", default=None)
    id: int = msgspec.field(name="ID", default=0)
    key: int = 0
    metadata: str = ""
    namespace: str = msgspec.field(name="K8sNamespace", default="")
    pod_name: str = msgspec.field(name="K8sPodName", default="")
    named_ports: list[NamedPort] | UnsetType | None = UNSET


class SharedAddress(msgspec.Struct, frozen=True, gc=False):
    """A row of the table ``shared-addresses``: an address of a pod, as its node tells."""

    address: str
    """The key: an address, or a prefix."""
    prefix: Prefix
    identity: int
    node: str
    """The address of its node; empty if that is not said."""
    value: str
    """The whole, as it was read."""
    encrypt_key: int = 0
    namespace: str = ""
    pod: str = ""
    ports: tuple[NamedPort, ...] = ()

    @property
    def claim(self) -> IpcacheEntry:
        """It, by way of its node."""
        return IpcacheEntry(
            prefix=self.prefix,
            identity=self.identity,
            source=Source.KVSTORE,
            resource=resource_of(self.address),
            tunnel_endpoint=_tunnel_endpoint(self.node),
            encrypt_key=self.encrypt_key,
        )


def resource_of(address: str) -> str:
    """Whose the claim of an address is."""
    return f"kvstore//{address}"


_ENCODE = msgspec.json.Encoder()
_DECODE = msgspec.json.Decoder(Pair)


def read_address(key: str, value: bytes) -> SharedAddress | None:
    """The parsed key; None if it has no address or no identity."""
    try:
        told = _DECODE.decode(value)
        prefix = ip_network(key)
    except (msgspec.MsgspecError, ValueError):
        return None
    if not told.id:
        return None
    return SharedAddress(
        address=key,
        prefix=str(prefix),
        identity=told.id,
        node=told.host_ip or "",
        value=value.decode(),
        encrypt_key=told.key & 0xFF,
        namespace=told.namespace,
        pod=told.pod_name,
        ports=tuple(told.named_ports) if told.named_ports else (),
    )


def address_keys(
    endpoint: Endpoint, node: str, host: IPAddress | None, ports: Iterable[NamedPort], key: int
) -> Iterator[OwnKey]:
    """The keys of an endpoint whose identity is known, one for each address."""
    for ip in endpoint.addresses:
        pair = Pair(
            ip=str(ip),
            host_ip=str(host) if host is not None else None,
            id=endpoint.identity,
            key=key,
            metadata=f"cilium-global:default:{node}:{endpoint.id}",
            namespace=endpoint.pod_namespace,
            pod_name=endpoint.pod_name,
            named_ports=list(ports) or UNSET,
        )
        yield OwnKey(f"{IPS}{ip}", _ENCODE.encode(pair).decode())


def _tunnel_endpoint(node: str) -> IPv4Address:
    try:
        ip = ip_address(node)
    except ValueError:
        return IPv4Address(0)
    return ip if isinstance(ip, IPv4Address) else IPv4Address(0)
