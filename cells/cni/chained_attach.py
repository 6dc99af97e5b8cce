"""Attaches a pod in a chain: creates an endpoint on the link that another plugin has created.

The other plugin stays responsible for addresses, routes and forwarding. Our programs only process packets in
both directions at the host's end of the link.

Source: Cilium 1.17, chaining mode generic-veth, with the aliases aws-cni, azure and flannel; error texts as
recorded from Cilium's plugin.
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
    PodNetlink,
    Undo,
    annotated_mac,
    begin_endpoint,
    set_pod_mac,
)
from cells.cni.protocol import CniError, chained_result
from cells.cni.request import PluginCall, PodReference
from cells.endpoint import DatapathConfiguration, Endpoint, EndpointRequest
from cells.netlink.connection import NetlinkError
from cells.netlink.rows import LinkInfo
from lifecycle import Logger

CHAINED_DATAPATH: Final = DatapathConfiguration(
    external_ipam=True, require_arp_passthrough=True, require_egress_prog=True, require_routing=False
)


class ChainedLink(msgspec.Struct, frozen=True):
    """Both ends of the existing link, and the pod's address of each family."""

    pod: LinkInfo
    host: LinkInfo
    ipv4: IPv4Address | None
    ipv6: IPv6Address | None


class ChainedAttacher:
    """Creates endpoints of pods that another plugin has attached. Synchronous, as every ADD."""

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

    def attach(
        self, call: PluginCall, pod: PodReference, pod_links: PodNetlink, undo: Undo
    ) -> PendingEndpoint:
        """Start the endpoint; once it is complete, the plugin prints the previous result.

        Raises CniError, and PoolEmpty if no policy map is prepared yet. ``undo`` then reverts every change,
        except the MTU of routes.
        """
        self._log.debug("chained", attachment=call.attachment_id, mode=call.conf.chain)
        try:
            chained = self._find_link(call.ifname, pod_links)
            mac = annotated_mac(call.conf, call.ifname)
            if mac is not None and mac != chained.pod.mac:
                self._set_mac(chained.pod, mac, pod_links, undo)
            if call.conf.enable_route_mtu or self._route_mtu:
                pod_links.set_route_mtu(self._mtu())
        except NetlinkError as error:
            raise CniError(f"unable to read the link of the chained plugin: {error}") from error
        new = begin_endpoint(self._endpoints, self._request(call, pod, chained, mac or chained.pod.mac), undo)

        def finish(endpoint: Endpoint) -> bytes:
            if endpoint.pod_mac != (mac or chained.pod.mac):  # the pod's annotation specifies another
                self._set_mac(chained.pod, endpoint.pod_mac, pod_links, undo)
            changed = None if endpoint.pod_mac == chained.pod.mac else (chained.pod.name, endpoint.pod_mac)
            return chained_result(bytes(call.conf.prev_result), call.conf.cni_version, changed)

        return PendingEndpoint(new, finish)

    def _find_link(self, ifname: str, pod_links: PodNetlink) -> ChainedLink:
        """Return the pod's link: the named one if it is a veth, else the first veth."""
        veths = [link for link in pod_links.links() if link.kind == "veth"]
        link = next((each for each in veths if each.name == ifname), veths[0] if veths else None)
        if link is None:
            raise CniError("no link found inside container")
        addresses = self._addresses(pod_links, link.ifindex)
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
        return ChainedLink(link, host, four, six)

    def _addresses(self, pod_links: PodNetlink, ifindex: int) -> list[IPAddress]:
        """Return the link's addresses of the node's families, without link-local ones."""
        families = {gateway.version for gateway in self._gateways()}
        return [
            ip for ip in pod_links.addresses_of(ifindex) if ip.version in families and not ip.is_link_local
        ]

    def _set_mac(self, link: LinkInfo, mac: bytes, pod_links: PodNetlink, undo: Undo) -> None:
        set_pod_mac(pod_links, link.ifindex, link.name, mac)
        undo.push("MAC address", partial(pod_links.set_mac, link.ifindex, link.name, link.mac))

    @staticmethod
    def _request(call: PluginCall, pod: PodReference, chained: ChainedLink, mac: bytes) -> EndpointRequest:
        return EndpointRequest(
            container_id=call.container_id,
            container_ifname=call.ifname,
            ifname=chained.host.name,
            ifindex=chained.host.ifindex,
            pod_mac=mac,
            host_mac=chained.host.mac,
            ipv4=chained.ipv4,
            ipv6=chained.ipv6,
            network=call.conf.name,
            pod_name=pod.name,
            pod_namespace=pod.namespace,
            pod_uid=pod.uid,
            datapath=CHAINED_DATAPATH,
        )
