"""The DEL of a pod: maps and state go at once, the link and its address in a moment.

Needs: Endpoints, LinkTeardown.   Gives: Detacher, which also collects what the runtime has forgotten.
Source: Cilium 1.17, DEL: it names only the container, so all interfaces of a container go.
"""

from __future__ import annotations

from collections.abc import Collection

import anyio

from cells.cni.server.attachment.edges import Endpoints, PodEnd
from cells.cni.server.attachment.link_teardown import LinkTeardown, PodAddress
from cells.cni.server.protocol.request import Call, chain_of
from cells.endpoint import Endpoint, EndpointError
from cells.node.netlink import NetlinkError
from lifecycle import Logger


class Detacher:
    """Detaches pods. Deleting what is not there is success: the runtime asks again until it hears that."""

    def __init__(self, endpoints: Endpoints, teardown: LinkTeardown, log: Logger) -> None:
        self._endpoints = endpoints
        self._teardown = teardown
        self._log = log

    def detach_container(self, container_id: str) -> int:
        """Remove the container's endpoints and let their links go; returns how many there were."""
        found = self._endpoints.by_container(container_id) if container_id else []
        for endpoint in found:
            self._detach(endpoint)
        return len(found)

    def detach_attachment(self, container_id: str, ifname: str) -> bool:
        """Remove the endpoint of one interface of a container; whether there was one."""
        endpoint = self._endpoints.by_attachment(container_id, ifname)
        if endpoint is None:
            return False
        self._detach(endpoint)
        return True

    async def settled(self) -> None:
        """Return once the links that are on their way out now are gone."""
        await self._teardown.settled()

    def detach_named(self, id_text: str) -> int:
        """Remove the endpoint of an id such as ``cni-attachment-id:<cid>:eth0``; 0 when there is none."""
        try:
            endpoint = self._endpoints.lookup(id_text)
        except EndpointError as error:
            self._log.warning("delete request not understood", id=id_text, error=error.text)
            return 0
        if endpoint is None:
            return 0
        self._detach(endpoint)
        return 1

    def collect(self, network: str, valid: Collection[tuple[str, str]], busy: Collection[str]) -> int:
        """Remove the network's attachments that are not ``valid`` (container, interface); returns how many.

        Never one of another network or of an unknown one, never one whose link another plugin made, nor of
        a container in ``busy``, which has a call under way.
        """
        stale = [
            endpoint
            for endpoint in self._endpoints.all()
            if endpoint.network
            and endpoint.network == network
            and not endpoint.datapath.on_anothers_link
            and endpoint.container_id not in busy
            and (endpoint.container_id, endpoint.container_ifname) not in valid
        ]
        for endpoint in stale:
            self._detach(endpoint)
        return len(stale)

    def _detach(self, endpoint: Endpoint) -> None:
        problems = self._endpoints.delete(endpoint, release_address=False)
        if problems:
            self._log.warning("pod removed with problems", endpoint=endpoint.id, problems=list(problems))
        if not endpoint.datapath.on_anothers_link:
            leaving = (PodAddress(ip, endpoint.pool_of(ip)) for ip in endpoint.addresses)
            self._teardown.start(endpoint.ifindex, *leaving)
        self._log.info("pod removed", endpoint=endpoint.id, pod=endpoint.title)

    def owns_interface(self, call: Call) -> bool:
        """Whether the pod's interface is ours to delete; in a chain it is another plugin's.

        Raises CniError for an unknown chaining mode.
        """
        return not chain_of(call.conf)

    async def remove_stray(self, ifname: str, pod: PodEnd, cookie: int) -> None:
        """Delete an unknown interface, unless a live endpoint has it; failures are logged."""
        for endpoint in self._endpoints.all():
            if cookie and endpoint.netns_cookie == cookie and endpoint.container_ifname == ifname:
                return
        try:
            if await anyio.to_thread.run_sync(pod.delete, ifname):
                self._log.info("stray pod interface deleted", interface=ifname)
        except NetlinkError as error:
            self._log.warning("stray pod interface not deleted", interface=ifname, error=str(error))
