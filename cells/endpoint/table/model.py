"""What an endpoint is: the request that makes one, the row that describes it, the error that refuses it.

For:   everything that talks about endpoints (REST handlers, CNI server, restore, status).
Needs: nothing.   Gives: Endpoint, EndpointRequest, DatapathConfiguration, EndpointError.
"""

from ipaddress import IPv4Address, IPv6Address

import msgspec

from cells.endpoint.table.states import State
from lifecycle.http import Refusal

ZERO_MAC = bytes(6)
IPAddress = IPv4Address | IPv6Address


def addresses_of(ipv6: IPv6Address | None, ipv4: IPv4Address | None) -> tuple[IPAddress, ...]:
    """Those there are, IPv6 first."""
    if ipv6 is None:
        return () if ipv4 is None else (ipv4,)
    return (ipv6,) if ipv4 is None else (ipv6, ipv4)


class EndpointError(Refusal):
    """An endpoint request that cannot be served.

    ``status`` is the HTTP status of ``PUT|GET|DELETE /endpoint`` (400, 404, 500); ``text`` the documented
    sentence, as the REST API and the CNI plugin show it.
    """


class DatapathConfiguration(msgspec.Struct, frozen=True):
    """``datapath-configuration`` of the API: what the requester wants done (or left) for this endpoint."""

    external_ipam: bool = False
    """The address is another IPAM's: it is neither claimed at restore nor released at delete."""
    require_arp_passthrough: bool = False
    """The stack, or a bridge, answers the pod's ARP and neighbour discovery."""
    require_egress_prog: bool = False
    """A program looks at what the host's end of the link sends, too."""
    require_routing: bool | None = None
    """False leaves the pod's packets to the stack, or a bridge, also those to pods of this node."""
    install_endpoint_route: bool = False
    """The node has a route to the pod's addresses alone, over its link."""
    disable_sip_verification: bool = False

    @property
    def on_anothers_link(self) -> bool:
        """Whether another plugin made the link, as in a chain: address and routes are that one's, too."""
        return self.external_ipam and self.require_arp_passthrough

    def with_endpoint_routes(self, *, wanted: bool) -> "DatapathConfiguration":
        """The same with a route of its own to the pod, over the stack, or without one."""
        if self.on_anothers_link or wanted == self.install_endpoint_route:
            return self
        return msgspec.structs.replace(
            self,
            install_endpoint_route=wanted,
            require_egress_prog=wanted,
            require_routing=False if wanted else None,
        )

    @property
    def egress_prog(self) -> bool:
        """Whether what comes to the pod by its link is looked at there: nothing did so before."""
        return self.require_egress_prog or self.require_routing is False


NO_DATAPATH_CONFIGURATION = DatapathConfiguration()


class EndpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``PUT /endpoint`` and our own plugin's ADD both give.

    The link exists already (``ifname``/``ifindex`` are its host side) and so does the address.
    """

    container_id: str = ""
    container_ifname: str = ""
    container_name: str = ""
    ifname: str
    ifindex: int
    pod_mac: bytes
    host_mac: bytes
    ipv4: IPv4Address | None
    pool: str = ""
    """Of the IPv4 address."""
    expiration_uuid: str = ""
    """Expiration timer of the address, stopped once the endpoint stands; empty when none was armed."""
    ipv6: IPv6Address | None = None
    ipv6_pool: str = ""
    ipv6_expiration_uuid: str = ""
    network: str = ""
    """Name of the CNI network the attachment belongs to; empty when the requester does not tell."""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    netns_cookie: int = 0
    labels: tuple[str, ...] = ()
    """``source:key[=value]``, as in the API."""
    disable_legacy_identifiers: bool = False
    datapath: DatapathConfiguration = NO_DATAPATH_CONFIGURATION

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        """The pod's addresses, IPv6 first."""
        return addresses_of(self.ipv6, self.ipv4)

    @property
    def attachment_id(self) -> str:
        """``<container id>:<container ifname>``, as of the endpoint to be; empty without a container."""
        if not self.container_id:
            return ""
        return f"{self.container_id}:{self.container_ifname}" if self.container_ifname else self.container_id


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ``endpoints`` table: an attachment of a container to this node's network."""

    id: int
    container_id: str
    container_ifname: str
    ifname: str
    ifindex: int
    pod_mac: bytes
    host_mac: bytes
    ipv4: IPv4Address | None
    pool: str
    """Of the IPv4 address."""
    identity: int
    labels: tuple[str, ...]
    """Security-relevant labels, sorted: those the identity stands for."""
    pod_name: str
    pod_namespace: str
    pod_uid: str
    netns_cookie: int
    state: State
    created: float
    """Unix seconds."""
    info_labels: tuple[str, ...] = ()
    custom_labels: tuple[str, ...] = ()
    """Those of the labels that a user put on the endpoint; the others are the pod's."""
    container_name: str = ""
    disable_legacy_identifiers: bool = False
    datapath: DatapathConfiguration = NO_DATAPATH_CONFIGURATION
    ipv6: IPv6Address | None = None
    ipv6_pool: str = ""
    network: str = ""
    """Name of the CNI network the attachment belongs to; empty when it is not known."""

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        """The pod's addresses, IPv6 first."""
        return addresses_of(self.ipv6, self.ipv4)

    @property
    def pod_labels(self) -> tuple[str, ...]:
        """The security-relevant labels that no user put on the endpoint."""
        if not self.custom_labels:
            return self.labels
        return tuple(label for label in self.labels if label not in self.custom_labels)

    def pool_of(self, address: IPAddress) -> str:
        """The pool one of its addresses is from."""
        return self.ipv6_pool if address.version == 6 else self.pool

    @property
    def attachment_id(self) -> str:
        """``<container id>:<container ifname>``; the second part is left out when there is none."""
        return f"{self.container_id}:{self.container_ifname}" if self.container_ifname else self.container_id

    @property
    def pod(self) -> str:
        """``<namespace>/<pod name>``; ``/`` for an endpoint that is not a pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def cep_name(self) -> str:
        """Name of the endpoint's CiliumEndpoint: the pod's, with the interface where a pod has several."""
        if self.disable_legacy_identifiers and self.pod_name:
            return f"{self.pod_name}-{self.container_ifname}"
        return self.pod_name

    @property
    def title(self) -> str:
        """How people name it: the pod, else the attachment."""
        return self.pod if self.pod_name else self.attachment_id
