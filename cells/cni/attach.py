"""Attaches a pod: addresses, veth pair, endpoint, links up, pod configured. Complete or rolled back.

The links come up last, once all entries in BPF maps are written.

Source: CNI spec 1.1, section 4 (ADD).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import anyio
import msgspec

from cells.base.addresses import IPAddress
from cells.cni.attachment import (
    MODES,
    NO_ENDPOINT,
    AttachAllocator,
    AttachEndpoints,
    Links,
    MacPair,
    PendingEndpoint,
    PodNetlink,
    Undo,
    begin_endpoint,
    macs_of,
    set_pod_mac,
)
from cells.cni.chained_attach import ChainedAttacher
from cells.cni.detach import LinkTeardown, PodAddress
from cells.cni.protocol import (
    TRY_AGAIN,
    Attached,
    CniError,
    ErrorContext,
    PluginAction,
    kernel_reason,
    result_json,
)
from cells.cni.request import PluginCall, PodReference, check_add, delegated_addresses, pod_of
from cells.endpoint import DatapathConfiguration, Endpoint, EndpointRequest, NewEndpoint
from cells.netlink.connection import NetlinkError
from cells.netlink.links import CreatedLink
from cells.netlink.messages import OffloadLimits, VethPair
from cells.node.ipam.ranges import IpamError, IpamLaterError
from lifecycle import HiveError, Logger

ALIAS = "hive endpoint"
"""Prefix of the alias (ifalias) of our links, before the endpoint id; set by the message that brings them up.
"""

IDENTITY_SECONDS = 60.0
"""Seconds that an ADD waits for the identity of its pod's labels."""
_HOST_SIDE = ErrorContext(NetlinkError, "unable to set up veth on host side")
_SO_NETNS_COOKIE = 71  # asm-generic/socket.h, Linux 5.14


class LinkExists(Exception):  # noqa: N818  # not a failure: remove_stale_links(), then retry
    """The name of a link is taken, in the pod or on the node."""


class AddressesPending(Exception):  # noqa: N818  # not a failure: wait(), then retry
    """No address is free, but some will be released. ``error`` is reported if that takes too long."""

    def __init__(self, error: CniError, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait = wait
        """Waits until a retry may succeed."""


class PodNetns(msgspec.Struct, frozen=True):
    """The pod's namespace, as passed by the plugin; its descriptors belong to the connection."""

    netns_fd: int
    cookie: int
    """The netns cookie, unique until the node reboots; 0 if the kernel has none."""
    link: PodNetlink


class Prepared(msgspec.Struct):
    """An ADD with its parameters."""

    call: PluginCall
    pod: PodReference
    pod_netns: PodNetns
    pair: VethPair | None = None
    """The veth pair to create; None in a chain, where the link exists."""
    allocated: tuple[PodAddress, ...] = ()
    started: bool = False
    """Whether the link is being created; then call await_link()."""
    link: CreatedLink | None = None
    failure: NetlinkError | None = None


def host_link_name(container_id: str, ifname: str) -> str:
    """Return the name of the host's end: ``lxc`` and 12 hex digits, 15 characters (IFNAMSIZ - 1)."""
    return "lxc" + sha256(f"{container_id}:{ifname}".encode()).hexdigest()[:12]


def netns_cookie(netlink_fd: int) -> int:
    """Return the cookie of the namespace that a socket was opened in; 0 if the kernel has none."""
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE, fileno=netlink_fd
    ) as borrowed:
        try:
            return int.from_bytes(borrowed.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), "little")
        except OSError:
            return 0
        finally:
            borrowed.detach()


class Attacher:
    """Attaches pods. Synchronous except identify(), so concurrent ADDs cannot interleave."""

    def __init__(
        self,
        links: Links,
        addresses: AttachAllocator,
        endpoints: AttachEndpoints,
        teardown: LinkTeardown,
        *,
        gateways: Callable[[], Sequence[IPAddress]],
        mtu: Callable[[], int],
        state: Path,
        log: Logger,
        route_mtu: Callable[[], int] | None = None,
        route_mtu_in_chains: bool = False,
        delegated: bool = False,
        reserved_ports: Callable[[], str] = str,
        limits: Callable[[], OffloadLimits] = OffloadLimits,
    ) -> None:
        """``delegated``: another IPAM plugin assigns the addresses."""
        self._links = links
        self._addresses = addresses
        self._endpoints = endpoints
        self._teardown = teardown
        self._gateways = gateways
        self._mtu = mtu
        self._route_mtu = route_mtu or mtu
        self._state = state
        self._delegated = delegated
        self._reserved_ports = reserved_ports
        self._limits = limits
        self._log = log
        self._chained = ChainedAttacher(
            links, endpoints, gateways=gateways, mtu=self._route_mtu, route_mtu=route_mtu_in_chains, log=log
        )

    def problem(self) -> str:
        """Return why every ADD fails at present; "" if no reason is known."""
        if not os.access(self._state, os.W_OK | os.X_OK):
            return f"state directory {self._state} cannot be written"
        try:
            self._mtu()
            return "" if self._gateways() else "the router has no addresses"
        except HiveError as error:
            return str(error)

    def prepare(self, call: PluginCall, pod_netns: PodNetns, undo: Undo) -> Prepared:
        """Choose the pod's addresses and link parameters, without changes in the kernel.

        ``undo`` receives the reverse of each step, also if this raises: the caller rolls back. Raises
        CniError, and AddressesPending if no address is free yet.
        """
        previous = check_add(call, delegated=self._delegated)
        pod = pod_of(call.args)
        if self._endpoints.by_attachment(call.container_id, call.ifname) is not None:
            raise _endpoint_exists(call.attachment_id)
        if previous is not None:
            return Prepared(call, pod, pod_netns)
        macs, mtu = self._macs(call, pod), self._mtu()
        allocated = self._delegated_addresses(call) if self._delegated else self._allocate(pod, undo)
        pair = VethPair(
            host_name=host_link_name(call.container_id, call.ifname),
            host_mac=macs.host,
            pod_name=call.ifname,
            pod_mac=macs.pod,
            mtu=mtu,
            netns_fd=pod_netns.netns_fd,
            limits=self._limits(),
        )
        return Prepared(call, pod, pod_netns, pair, allocated)

    def start_link(self, prepared: Prepared) -> bool:
        """Start to create the link in the background, one at a time; return False in a chain."""
        if prepared.pair is None:
            return False
        self._links.start_create_veth(prepared.pair)
        prepared.started = True
        return True

    def await_link(self, prepared: Prepared) -> None:
        """Wait until the started link exists; attach() raises its errors."""
        try:
            prepared.link = self._links.finish_create_veth()
        except NetlinkError as error:
            prepared.failure = error

    def attach(self, prepared: Prepared, undo: Undo) -> PendingEndpoint:
        """Attach the pod up to its endpoint's identity; then identify(), if needed, and complete().

        ``undo`` as for prepare(). Raises CniError, LinkExists if a link's name is taken, and PoolEmpty if no
        policy map is prepared yet.
        """
        call, pod, pod_netns, pair, allocated = (
            prepared.call,
            prepared.pod,
            prepared.pod_netns,
            prepared.pair,
            prepared.allocated,
        )
        if pair is None:
            return self._chained.attach(call, pod, pod_netns.link, undo)
        route_mtu = self._route_mtu()
        addresses = tuple(each.ip for each in allocated)
        routers = {router.version: router for router in self._gateways()}
        gateways = tuple(routers[ip.version] for ip in addresses)
        created = self._create(prepared, undo)
        new = self._register(
            call, pod, pair, created, allocated=allocated, cookie=pod_netns.cookie, undo=undo
        )

        def finish(endpoint: Endpoint) -> bytes:
            if endpoint.pod_mac != pair.pod_mac:  # the pod's annotation specifies another
                set_pod_mac(pod_netns.link, created.pod_ifindex, call.ifname, endpoint.pod_mac)
            # Neither end may drop the pod's first packets: a lost ARP request delays it by a second. The
            # pod's end comes up second, so its qdisc is active; sync_carrier() activates the node's.
            with _HOST_SIDE:
                self._links.activate(created.host_ifindex, f"{ALIAS} {endpoint.id}")
                self._endpoints.route(endpoint)
            self._configure(
                pod_netns.link, created.pod_ifindex, call.ifname, addresses, gateways, mtu=route_mtu
            )
            with _HOST_SIDE:
                self._links.sync_carrier(created.host_ifindex)
            attached = Attached(
                pair.host_name,
                pair.host_mac,
                call.ifname,
                endpoint.pod_mac,
                call.netns,
                addresses,
                gateways,
                route_mtu,
            )
            return result_json(attached, call.conf.cni_version)

        return PendingEndpoint(new, finish)

    async def identify(self, attachment: PendingEndpoint) -> None:
        """Wait for the endpoint's identity. Raises CniError after IDENTITY_SECONDS."""
        with anyio.move_on_after(IDENTITY_SECONDS) as waiting, NO_ENDPOINT:
            await self._endpoints.identify(attachment.new)
        if waiting.cancelled_caught:
            text = f"no identity for its labels within {IDENTITY_SECONDS:g} s"
            raise CniError(f"unable to create endpoint: {text}", code=TRY_AGAIN)

    def complete(self, attachment: PendingEndpoint) -> tuple[Endpoint, bytes]:
        """Bring the endpoint and its link up; return it, and the plugin's output. Raises CniError."""
        with NO_ENDPOINT:
            endpoint = self._endpoints.complete(attachment.new)
        return endpoint, attachment.finish(endpoint)

    def ports_to_reserve(self, prepared: Prepared) -> str:
        """Return the ports that the plugin reserves in the pod; none in a chain, as in Cilium."""
        return self._reserved_ports() if prepared.pair is not None and prepared.call.reserves_ports else ""

    def _macs(self, call: PluginCall, pod: PodReference) -> MacPair:
        mode = call.conf.mac_addr_mode
        if mode not in MODES:
            self._log.warning("unknown macAddrMode, using random MAC addresses", mode=mode, pod=pod.owner)
        return macs_of(call.conf, pod, call.ifname)

    def _delegated_addresses(self, call: PluginCall) -> tuple[PodAddress, ...]:
        """Return the delegated plugin's addresses of the node's families.

        Raises CniError; before the plugin has called it, with the action to call it.
        """
        if not call.addresses:
            raise CniError(
                "the agent's ipam is delegated-plugin, but the request contains no address:"
                " install the plugin that came with the agent",
                action=PluginAction.ADDRESSES,
            )
        families = {gateway.version for gateway in self._gateways()}
        found = tuple(PodAddress(ip, "") for ip in delegated_addresses(call) if ip.version in families)
        if not found:
            raise CniError("IPAM did provide neither IPv4 nor IPv6 address")
        return found

    def _allocate(self, pod: PodReference, undo: Undo) -> tuple[PodAddress, ...]:
        """Allocate an address of each family, IPv6 first."""
        try:
            allocations = self._addresses.allocate_next(pod.owner)
        except IpamError as error:
            refused = CniError(f"unable to allocate IP via local cilium agent: {error.text}")
            if self._teardown.busy:
                raise AddressesPending(refused, self._teardown.wait_any_deleted) from error
            if isinstance(error, IpamLaterError):
                raise AddressesPending(refused, error.wait) from error
            raise refused from error
        addresses = tuple(PodAddress(each.ip, each.pool) for each in allocations)
        undo.push("addresses", partial(self._teardown.release, *addresses))
        return addresses

    def _configure(
        self,
        pod_link: PodNetlink,
        ifindex: int,
        ifname: str,
        addresses: Sequence[IPAddress],
        gateways: Sequence[IPAddress],
        *,
        mtu: int,
    ) -> None:
        """Configure addresses and routes in the pod. If IPv6 is disabled there, the plugin must enable it."""
        families = " and ".join(f"IPv{ip.version}" for ip in addresses)
        what = f"unable to configure interfaces in container namespace: error configuring {families}"
        try:
            pod_link.configure(ifindex, ifname, addresses, gateways, mtu)
        except NetlinkError as error:
            off = error.errno == errno.EACCES and any(ip.version == 6 for ip in addresses)
            raise CniError(
                f"{what}: {error}", action=PluginAction.IPV6 if off else PluginAction.NONE
            ) from error

    def _create(self, prepared: Prepared, undo: Undo) -> CreatedLink:
        assert prepared.pair is not None  # noqa: S101  (checked by attach())
        try:
            if prepared.failure is not None:
                raise prepared.failure
            created = prepared.link or self._links.create_veth(prepared.pair)
        except NetlinkError as error:
            if error.errno == errno.EEXIST:
                raise LinkExists from error
            raise CniError(
                f"unable to set up veth on host side: unable to create veth pair: {kernel_reason(error)}"
            ) from error
        undo.forget()  # from here on, addresses are released after the link's deletion
        undo.push("link", partial(self._teardown.finish, created.host_ifindex, *prepared.allocated))
        return created

    def _register(
        self,
        call: PluginCall,
        pod: PodReference,
        pair: VethPair,
        created: CreatedLink,
        *,
        allocated: Sequence[PodAddress],
        cookie: int,
        undo: Undo,
    ) -> NewEndpoint:
        by_family = {each.ip.version: each for each in allocated}
        four, six = by_family.get(4), by_family.get(6)
        request = EndpointRequest(
            container_id=call.container_id,
            container_ifname=call.ifname,
            ifname=pair.host_name,
            ifindex=created.host_ifindex,
            pod_mac=pair.pod_mac,
            host_mac=pair.host_mac,
            ipv4=four.ip if four is not None and isinstance(four.ip, IPv4Address) else None,
            pool=four.pool if four is not None else "",
            ipv6=six.ip if six is not None and isinstance(six.ip, IPv6Address) else None,
            ipv6_pool=six.pool if six is not None else "",
            network=call.conf.name,
            pod_name=pod.name,
            pod_namespace=pod.namespace,
            pod_uid=pod.uid,
            netns_cookie=cookie,
            datapath=DatapathConfiguration(external_ipam=self._delegated),
        )
        return begin_endpoint(self._endpoints, request, undo)

    async def remove_stale_links(self, call: PluginCall, pod_netns: PodNetns) -> None:
        """Delete stale links with the names that this ADD needs.

        Waits for links in deletion. In the pod, a link with the name but without an endpoint is deleted, as
        by Cilium's plugin; on the node, only one with our alias. Raises CniError if the link is in use or not
        ours.
        """
        if await self._teardown.wait_deleted():
            return
        self.refuse_in_use(call.ifname, pod_netns.cookie)
        try:
            await anyio.to_thread.run_sync(pod_netns.link.delete, call.ifname)
            found = self._links.find(host_link_name(call.container_id, call.ifname))
            if found is None:
                return
            if not found.alias.startswith(ALIAS) or found.ifindex in {
                e.ifindex for e in self._endpoints.all()
            }:
                raise CniError("unable to set up veth on host side: unable to create veth pair: file exists")
            await self._links.reap((found.ifindex,))
        except NetlinkError as error:
            raise CniError(f"unable to remove a leftover of interface {call.ifname}: {error}") from error

    def refuse_in_use(self, ifname: str, cookie: int) -> None:
        """Raise CniError if a live endpoint, of any container, has this interface of this namespace."""
        for endpoint in self._endpoints.all():
            if cookie and endpoint.netns_cookie == cookie and endpoint.container_ifname == ifname:
                raise _endpoint_exists(endpoint.attachment_id)


def _endpoint_exists(attachment_id: str) -> CniError:
    return CniError(
        f"unable to create endpoint: endpoint for CNI attachment ID {attachment_id} already exists"
    )
