"""The ADD of a pod with a link that another plugin has made: an endpoint on that link, and nothing else.

Source: Cilium 1.17, chaining mode generic-veth, which aws-cni, azure and flannel are other names of; texts as
recorded from the original plugin. Addresses, routes and the way packets take stay the other plugin's: ours
only looks at them, in both directions, at the host's end of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

from cells.base.addresses import IPAddress
from cells.cni.attachment import (
    AttachEndpoints,
    Links,
    PendingEndpoint,
    PodEnd,
    Undo,
    annotated_mac,
    begin_endpoint,
    set_pod_mac,
)
from cells.cni.protocol import CniError, passed_on
from cells.cni.request import PluginCall, PodReference
from cells.endpoint import DatapathConfiguration, Endpoint, EndpointRequest
from cells.netlink.connection import NetlinkError
from cells.netlink.rows import LinkInfo
from lifecycle import Logger

ON_ANOTHERS_LINK: Final = DatapathConfiguration(
    external_ipam=True, require_arp_passthrough=True, require_egress_prog=True, require_routing=False
)


class Taken(msgspec.Struct, frozen=True):
    """The link that is there, both ends of it, and the pod's address of each family."""

    pod: LinkInfo
    host: LinkInfo
    ipv4: IPv4Address | None
    ipv6: IPv6Address | None


class ChainedAttacher:
    """Makes endpoints of pods that are attached already; one synchronous piece of work, as all ADDs."""

    def __init__(
        self,
        links: Links,
        endpoints: AttachEndpoints,
        *,
        gateways: Callable[[], Sequence[IPAddress]],
        mtu: Callable[[], int],
        route_mtu: bool,
        log: Logger,
    ) -> None:
        self._links = links
        self._endpoints = endpoints
        self._gateways = gateways
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._log = log

    def attach(self, call: PluginCall, pod: PodReference, inside: PodEnd, undo: Undo) -> PendingEndpoint:
        """Begin the endpoint; once it is complete, the plugin prints the previous result.

        Raises CniError, and PoolEmpty when there is no policy map yet. Nothing but what ``undo`` knows has
        been done then, but for the routes' MTU, which it does no harm to have.
        """
        self._log.debug("chained", attachment=call.attachment_id, mode=call.conf.chain)
        try:
            taken = self._take(call.ifname, inside)
            mac = annotated_mac(call.conf, call.ifname)
            if mac is not None and mac != taken.pod.mac:
                self._set_mac(taken.pod, mac, inside, undo)
            if call.conf.enable_route_mtu or self._route_mtu:
                inside.set_route_mtu(self._mtu())
        except NetlinkError as error:
            raise CniError(f"unable to look at the link of the chained plugin: {error}") from error
        new = begin_endpoint(self._endpoints, self._request(call, pod, taken, mac or taken.pod.mac), undo)

        def finish(endpoint: Endpoint) -> bytes:
            if endpoint.pod_mac != (mac or taken.pod.mac):  # the pod's object asks for another
                self._set_mac(taken.pod, endpoint.pod_mac, inside, undo)
            changed = None if endpoint.pod_mac == taken.pod.mac else (taken.pod.name, endpoint.pod_mac)
            return passed_on(bytes(call.conf.prev_result), call.conf.cni_version, changed)

        return PendingEndpoint(new, finish)

    def _take(self, ifname: str, inside: PodEnd) -> Taken:
        """The pod's link: the one the runtime names, if it is a veth, else the first that is."""
        veths = [link for link in inside.links() if link.kind == "veth"]
        link = next((each for each in veths if each.name == ifname), veths[0] if veths else None)
        if link is None:
            raise CniError("no link found inside container")
        addresses = self._addresses(inside, link.ifindex)
        host = None if link.link_netnsid is None else self._links.at(link.peer_ifindex)
        if host is None or host.kind != "veth" or host.peer_ifindex != link.ifindex:
            raise CniError(
                "unable to determine name of veth pair on the host side",
                details=f"the peer of {link.name} in the pod is not in the node's network namespace",
            )
        four = next((ip for ip in addresses if isinstance(ip, IPv4Address)), None)
        six = next((ip for ip in addresses if isinstance(ip, IPv6Address)), None)
        if four is None and six is None:
            raise CniError("unable to determine IP address of the container")
        return Taken(link, host, four, six)

    def _addresses(self, inside: PodEnd, ifindex: int) -> list[IPAddress]:
        """Those of the families this node has; never one that is good on the link alone."""
        families = {gateway.version for gateway in self._gateways()}
        return [ip for ip in inside.addresses_of(ifindex) if ip.version in families and not ip.is_link_local]

    def _set_mac(self, link: LinkInfo, mac: bytes, inside: PodEnd, undo: Undo) -> None:
        set_pod_mac(inside, link.ifindex, link.name, mac)
        undo.push("MAC address", partial(inside.set_mac, link.ifindex, link.name, link.mac))

    @staticmethod
    def _request(call: PluginCall, pod: PodReference, taken: Taken, mac: bytes) -> EndpointRequest:
        return EndpointRequest(
            container_id=call.container_id,
            container_ifname=call.ifname,
            ifname=taken.host.name,
            ifindex=taken.host.ifindex,
            pod_mac=mac,
            host_mac=taken.host.mac,
            ipv4=taken.ipv4,
            ipv6=taken.ipv6,
            network=call.conf.name,
            pod_name=pod.name,
            pod_namespace=pod.namespace,
            pod_uid=pod.uid,
            datapath=ON_ANOTHERS_LINK,
        )
