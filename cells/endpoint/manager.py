"""The endpoints of this node: made, found, regenerated and removed here.

Source: Cilium 1.17, the endpoint manager: states, order of create and delete, lookups.

All but waiting for an identity is synchronous and on the event loop, so no one ever sees a half-made
endpoint.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from msgspec.structs import replace

from cells.base.addresses import IPAddress
from cells.cluster.identity.identities import Identities
from cells.endpoint import model
from cells.endpoint.creation import Builds, EndpointCreation, NewEndpoint, RegenerationRecovery
from cells.endpoint.kernel import (
    REFUSALS,
    ConntrackScrub,
    EndpointAddresses,
    Realization,
)
from cells.endpoint.labels import EndpointLabels, Relabel
from cells.endpoint.model import (
    Code,
    Endpoint,
    EndpointError,
    EndpointRequest,
    Level,
    State,
    StatusLog,
    Subject,
)
from cells.endpoint.registry import Registry
from lifecycle import Logger


class EndpointResources:
    """What an endpoint uses beside the kernel: its identity, its addresses, and their flows."""

    def __init__(self, identities: Identities, addresses: EndpointAddresses, scrub: ConntrackScrub) -> None:
        self._identities = identities
        self._addresses = addresses
        self.forgotten = scrub.forgotten
        """Returns once the flows of these addresses are forgotten, or that takes too long."""
        self._forget_flows = scrub.forget_flows

    def of(self, endpoint: Endpoint, *, addresses: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """By name, how each is given back; its addresses only if they are to be, and are of our IPAM."""
        yield "identity", partial(self._identities.release, endpoint.identity)
        for address in endpoint.addresses:
            yield "conntrack", partial(self._forget_flows, address)
            if addresses and not endpoint.datapath.external_ipam:
                yield "address", partial(self._addresses.release, address, endpoint.pool_of(address))


class Endpoints:
    """Makes endpoints and keeps them; their rows are the ``endpoints`` table."""

    def __init__(
        self,
        registry: Registry,
        realization: Realization,
        creation: EndpointCreation,
        relabel: Relabel,
        builds: Builds,
        recovery: RegenerationRecovery,
        used: EndpointResources,
        log: Logger,
    ) -> None:
        self.builds = builds
        self._registry = registry
        self._realization = realization
        self._creation = creation
        self._relabel = relabel
        self._recovery = recovery
        self._used = used
        self._log = log

    @property
    def source_ip_verification(self) -> bool:
        """Whether pods may send from their own addresses only; an endpoint may be exempt."""
        return self._realization.source_ip_verification

    @source_ip_verification.setter
    def source_ip_verification(self, verify: bool) -> None:
        self._realization.source_ip_verification = verify

    # Looking

    def get(self, endpoint_id: int) -> Endpoint | None:
        """The endpoint with this number."""
        return self._registry.get(endpoint_id)

    def lookup(self, id_text: str) -> Endpoint | None:
        """The endpoint of an id such as ``12`` or ``ipv4:10.0.1.77``; None if there is none.

        Raises EndpointError 400 for an id that cannot be understood.
        """
        return self._registry.lookup(id_text)

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        """The endpoint of this interface of this container."""
        attachment = f"{container_id}:{container_ifname}" if container_ifname else container_id
        return self._registry.named(f"cni-attachment-id:{attachment}")

    def by_container(self, container_id: str) -> list[Endpoint]:
        """All endpoints of the container: what a batch delete means."""
        return self._registry.by_container(container_id)

    def is_new(self, endpoint_id: int) -> bool:
        """Whether the endpoint has not been built yet, because it waits for its identity."""
        return self._creation.of(endpoint_id) is not None

    def all(self) -> list[Endpoint]:
        """Every endpoint there is."""
        return list(self._registry.table.all())

    def status(self, endpoint_id: int) -> StatusLog:
        """What happened to the endpoint; an empty log for one that does not exist."""
        return self._registry.status(endpoint_id)

    def shown_state(self, endpoint: Endpoint) -> State:
        """The state as the API shows it: ``not-ready`` when ready but the last thing went wrong."""
        return self._registry.shown_state(endpoint)

    # Create

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """The first half of a creation: the endpoint has a number; it is listed if its identity is to come.

        Raises EndpointError 400 for a request that cannot be met and 500 for a kernel that refuses, PoolEmpty
        when no policy map is prepared (await PolicyMaps.ready() and call again).
        """
        return self._creation.begin(request)

    async def identify(self, new: NewEndpoint) -> None:
        """Wait until the endpoint has its identity; returns at once when it has.

        Raises EndpointError 500 when there is none for it, or it was deleted meanwhile; nothing is left then,
        nor when this is cancelled.
        """
        await self._creation.identify(new)

    def complete(self, new: NewEndpoint) -> Endpoint:
        """The second half: regenerate it for the first time; it comes back in state ready.

        Synchronous. The link is attached but not brought up: that is the caller's last step. Raises
        EndpointError 500 for a kernel or disk that refuses, or when the endpoint was deleted meanwhile;
        whatever is raised, nothing is left behind.
        """
        return self._creation.complete(new)

    async def create(self, request: EndpointRequest) -> Endpoint:
        """Make the endpoint of a link and an address that exist already; raises as the steps do."""
        new = self.begin(request)
        await self.identify(new)
        ready = self.complete(new)
        try:
            self.route(ready)
        except OSError as error:
            self.delete(ready, release_address=False)
            raise EndpointError(500, f"no route to the pod: {error}") from error
        return ready

    def route(self, endpoint: Endpoint) -> None:
        """Set the routes to the pod over its link, where it has its own; raises OSError.

        The link has to be up. They are deleted with it; the cell endpoint-routes restores them.
        """
        self._realization.route(endpoint)

    # Change

    async def relabel(self, endpoint_id: int, wanted: Callable[[Endpoint], EndpointLabels]) -> bool:
        """Give the endpoint the labels ``wanted`` of it, and the identity they stand for; see Relabel.run().

        Whether anything changed: then have it built. Raises EndpointError 500.
        """
        return await self._relabel.run(endpoint_id, wanted)

    def realize_policy(self, endpoint_id: int) -> bool:
        """Let the policy map of an endpoint that waits for another identity follow the rules meanwhile.

        Whether it waits; others are regenerated.
        """
        endpoint = self._registry.get(endpoint_id)
        if endpoint is None or endpoint.state is not State.WAITING_FOR_IDENTITY or self.is_new(endpoint_id):
            return False
        self._realization.quietly("policy map", self._realization.rewrite, endpoint, Level.POLICY)
        return True

    def verify_source(self, endpoint_id: int, verify: bool) -> None:
        """Let the endpoint send from its own addresses only, or from any; with its next build."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is not None:
            datapath = replace(endpoint.datapath, disable_sip_verification=not verify)
            self._registry.put(replace(endpoint, datapath=datapath))

    # Regenerate and restore

    def expose(self, restored: Iterable[Endpoint]) -> None:
        """Make endpoints from before a restart visible, in state restoring; none of them is touched yet."""
        for status in self._registry.add_all(restored):
            status.add(Code.OK, Subject.OTHER, model.RESTORED, State.RESTORING)

    def announce_build(self, endpoint_id: int, reason: str) -> bool:
        """Show that the endpoint is to be built; whether its state allows that."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is None or endpoint.state is State.RESTORING:
            return endpoint is not None
        return self._registry.set_state(endpoint_id, State.WAITING_TO_REGENERATE, model.triggered(reason))

    def build(self, endpoint_id: int, level: Level, reason: str) -> str:
        """Make kernel and state file agree with the endpoint's row; what went wrong, empty if all went well.

        The endpoint's build has been announced. What is right already is not written: a running pod notices
        nothing. After a failure the endpoint shows ``not-ready``. Regenerations is who calls this in turn.
        """
        registry = self._registry
        present = registry.get(endpoint_id)
        if present is None:
            return "not there"
        # a build is one step of the event loop: its state between is in the log, and in no row to be watched
        building = registry.moved(present, State.REGENERATING, model.STARTING, builder=True)
        if building is None:
            return "not to be built"
        status = registry.status(endpoint_id)
        wrong, began = "", time.perf_counter()
        try:
            self._realization.rewrite(building, level)
        except Exception as error:  # noqa: BLE001  # one endpoint's failure must not stop the other builds
            wrong = str(error) or type(error).__name__
            message = f"Error regenerating endpoint: {wrong}"
            status.add(Code.FAILURE, Subject.BPF, message, State.REGENERATING)
            self._log.warning(
                "endpoint regeneration failed",
                endpoint=endpoint_id,
                reason=reason,
                level=level.text,
                error=wrong,
                **({} if isinstance(error, REFUSALS) else {"exc_info": error}),
            )
        else:
            status.add(Code.OK, Subject.BPF, model.regenerated(reason), State.REGENERATING)
        self.builds.count(began, worked=not wrong)
        if (ready := registry.moved(building, State.READY, model.COMPLETED, builder=True)) is not None:
            registry.put(ready)
        return wrong

    # Delete

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Remove the endpoint from lookups, maps and disk; returns what went wrong, nothing if all went well.

        Every step is tried whatever happened before it. A missing one is fine; of one that waits
        for its identity the creation fails, and the caller keeps the addresses. The link is the
        caller's: without its rows, packets on it are dropped. ``release_address=False`` leaves the addresses
        to the caller too, who releases them once the link is removed; another IPAM's are never released.
        """
        new = self._creation.of(endpoint.id)
        if new is not None and new.endpoint.created == endpoint.created:
            self._creation.give_up(new)  # its creator gets the error, and undoes its own steps
            return ()
        current = self._registry.get(endpoint.id)
        if current is None or current.created != endpoint.created:
            return ()
        self._registry.remove(current)
        self._recovery.removed(current.id)
        wrong = self._realization.remove(current)
        for what, give_back in self._used.of(current, addresses=release_address):
            wrong.append(self._realization.quietly(what, give_back))
        return tuple(filter(None, wrong))

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once the flows of removed endpoints with these addresses are forgotten.

        Until then another endpoint with the address would be taken for the old one. Mostly there is nothing
        to wait for; waits no longer than a few seconds.
        """
        await self._used.forgotten(addresses)
