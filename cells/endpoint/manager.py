"""The endpoint manager: creates, looks up, changes, regenerates and removes the endpoints of this node.

The API, the CNI server, restore and the health endpoint use it. Everything except the wait for an identity is
synchronous on the event loop, so other tasks never observe a partly built endpoint.

Source: Cilium 1.17, pkg/endpointmanager: states, order of create and delete, lookups.
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
    REALIZATION_ERRORS,
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
    RegenerationLevel,
    State,
    StatusLog,
    Subject,
)
from cells.endpoint.registry import Registry
from lifecycle import Logger


class EndpointResources:
    """Releases an endpoint's identity and addresses, and scrubs conntrack entries of its addresses."""

    def __init__(self, identities: Identities, addresses: EndpointAddresses, scrub: ConntrackScrub) -> None:
        self._identities = identities
        self._addresses = addresses
        self.wait_scrubbed = scrub.wait_scrubbed
        """See ConntrackScrub.wait_scrubbed()."""
        self._scrub_conntrack = scrub.scrub_conntrack

    def of(self, endpoint: Endpoint, *, addresses: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the name of each resource and the function that releases it.

        Addresses are included if ``addresses`` is true and the agent's IPAM allocated them.
        """
        yield "identity", partial(self._identities.release, endpoint.identity)
        for address in endpoint.addresses:
            yield "conntrack", partial(self._scrub_conntrack, address)
            if addresses and not endpoint.datapath.external_ipam:
                yield "address", partial(self._addresses.release, address, endpoint.pool_of(address))


class Endpoints:
    """The manager of the node's endpoints, which are the rows of the ``endpoints`` table."""

    def __init__(
        self,
        registry: Registry,
        realization: Realization,
        creation: EndpointCreation,
        relabel: Relabel,
        builds: Builds,
        recovery: RegenerationRecovery,
        resources: EndpointResources,
        log: Logger,
    ) -> None:
        self.builds = builds
        self._registry = registry
        self._realization = realization
        self._creation = creation
        self._relabel = relabel
        self._recovery = recovery
        self._resources = resources
        self._log = log

    @property
    def source_ip_verification(self) -> bool:
        """Whether pods may send from their own addresses only; an endpoint may be exempt."""
        return self._realization.source_ip_verification

    @source_ip_verification.setter
    def source_ip_verification(self, verify: bool) -> None:
        """Whether pods may send from their own addresses only; single endpoints may be exempt."""
        self._realization.source_ip_verification = verify

    # Lookups

    def get(self, endpoint_id: int) -> Endpoint | None:
        """Return the endpoint with this id, or None."""
        return self._registry.get(endpoint_id)

    def lookup(self, id_text: str) -> Endpoint | None:
        """Return the endpoint with an id such as ``12`` or ``ipv4:10.0.1.77``, or None.

        Raises EndpointError 400 for an invalid id.
        """
        return self._registry.lookup(id_text)

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        """Return the endpoint of this interface of this container, or None."""
        attachment = f"{container_id}:{container_ifname}" if container_ifname else container_id
        return self._registry.named(f"cni-attachment-id:{attachment}")

    def by_container(self, container_id: str) -> list[Endpoint]:
        """Return all endpoints of the container, for a batch delete."""
        return self._registry.by_container(container_id)

    def is_new(self, endpoint_id: int) -> bool:
        """Whether the endpoint waits for its first identity, before its first build."""
        return self._creation.of(endpoint_id) is not None

    def all(self) -> list[Endpoint]:
        """Return all endpoints."""
        return list(self._registry.table.all())

    def status(self, endpoint_id: int) -> StatusLog:
        """Return the endpoint's status log; an empty one if the endpoint does not exist."""
        return self._registry.status(endpoint_id)

    def shown_state(self, endpoint: Endpoint) -> State:
        """Return the state that the API shows: ``not-ready`` if ready with a status other than OK."""
        return self._registry.shown_state(endpoint)

    # Create

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """First phase of a creation: allocate an id, and an identity if one is available without waiting.

        An endpoint that must wait for its identity is listed. Raises EndpointError 400 for an invalid request
        and 500 if the kernel rejects a step; PoolEmpty if no policy map is prepared (await PolicyMaps.ready()
        and call again).
        """
        return self._creation.begin(request)

    async def identify(self, new: NewEndpoint) -> None:
        """Wait until the endpoint has labels and an identity.

        Raises EndpointError 500 if no identity can be allocated, or the endpoint was deleted meanwhile. After
        an error or a cancellation, all state of the endpoint is removed.
        """
        await self._creation.identify(new)

    def complete(self, new: NewEndpoint) -> Endpoint:
        """Second phase: build the endpoint; return it in state ready.

        Synchronous. Attaches the program but leaves the link down: the caller sets the link up last. Raises
        EndpointError 500 if a step fails in the kernel or on disk, or the endpoint was deleted meanwhile.
        After an error, all state of the endpoint is removed.
        """
        return self._creation.complete(new)

    async def create(self, request: EndpointRequest) -> Endpoint:
        """Create the endpoint of an existing link and address.

        Raises EndpointError and PoolEmpty, as begin() and complete().
        """
        new = self.begin(request)
        await self.identify(new)
        ready = self.complete(new)
        try:
            self.route(ready)
        except OSError as error:
            self.delete(ready, release_address=False)
            raise EndpointError(500, f"route to the pod not installed: {error}") from error
        return ready

    def route(self, endpoint: Endpoint) -> None:
        """Install routes to the pod over its link, if the endpoint has its own; raises OSError.

        The link must be up. The kernel removes them with the link; the cell endpoint-routes reinstalls
        missing ones.
        """
        self._realization.route(endpoint)

    # Change

    async def relabel(self, endpoint_id: int, wanted: Callable[[Endpoint], EndpointLabels]) -> bool:
        """Set the ``wanted`` labels and their identity; see Relabel.run().

        Returns whether anything changed: then request a regeneration. Raises EndpointError 500.
        """
        return await self._relabel.run(endpoint_id, wanted)

    def realize_policy(self, endpoint_id: int) -> bool:
        """Update the policy map of an endpoint that waits for a new identity.

        Returns whether it waits; if not, request a regeneration.
        """
        endpoint = self._registry.get(endpoint_id)
        if endpoint is None or endpoint.state is not State.WAITING_FOR_IDENTITY or self.is_new(endpoint_id):
            return False
        self._realization.best_effort(
            "policy map", self._realization.repair, endpoint, RegenerationLevel.POLICY
        )
        return True

    def verify_source(self, endpoint_id: int, verify: bool) -> None:
        """Set source address verification of an endpoint; its next regeneration applies it."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is not None:
            datapath = replace(endpoint.datapath, disable_sip_verification=not verify)
            self._registry.put(replace(endpoint, datapath=datapath))

    # Regenerate and restore

    def expose(self, restored: Iterable[Endpoint]) -> None:
        """List endpoints of the previous agent in state restoring, without changes to the kernel."""
        for status in self._registry.add_all(restored):
            status.add(Code.OK, Subject.OTHER, model.RESTORED, State.RESTORING)

    def announce_build(self, endpoint_id: int, reason: str) -> bool:
        """Set the state to waiting-to-regenerate; return whether the current state allows it."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is None or endpoint.state is State.RESTORING:
            return endpoint is not None
        return self._registry.set_state(endpoint_id, State.WAITING_TO_REGENERATE, model.triggered(reason))

    def build(self, endpoint_id: int, level: RegenerationLevel, reason: str) -> str:
        """Apply the endpoint's row to kernel and state file; return the error, empty if it succeeded.

        Only Regenerations calls this, after announce_build(). State that is up to date is not written, so
        running pods are not affected. After a failure the API shows ``not-ready``.
        """
        registry = self._registry
        present = registry.get(endpoint_id)
        if present is None:
            return "the endpoint no longer exists"
        # synchronous, so only the status log shows this intermediate state
        building = registry.with_state(present, State.REGENERATING, model.STARTING, builder=True)
        if building is None:
            return f"the endpoint is {present.state.value}"
        status = registry.status(endpoint_id)
        failure, began = "", time.perf_counter()
        try:
            self._realization.repair(building, level)
        except Exception as error:  # noqa: BLE001  # one endpoint's failure must not stop the other builds
            failure = str(error) or type(error).__name__
            message = f"Error regenerating endpoint: {failure}"
            status.add(Code.FAILURE, Subject.BPF, message, State.REGENERATING)
            self._log.warning(
                "endpoint regeneration failed",
                endpoint=endpoint_id,
                reason=reason,
                level=level.text,
                error=failure,
                **({} if isinstance(error, REALIZATION_ERRORS) else {"exc_info": error}),
            )
        else:
            status.add(Code.OK, Subject.BPF, model.regenerated(reason), State.REGENERATING)
        self.builds.count(began, success=not failure)
        if (ready := registry.with_state(building, State.READY, model.COMPLETED, builder=True)) is not None:
            registry.put(ready)
        return failure

    # Delete

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Remove the endpoint from lookups, maps and disk; return the errors.

        Tries every step. A missing endpoint is a no-op; if it waits for its identity, its creation fails, and
        the creator releases its addresses. The caller deletes the link: without map entries, its packets are
        dropped. With ``release_address=False`` the caller releases the addresses, after the link; addresses
        of another IPAM are never released.
        """
        new = self._creation.of(endpoint.id)
        if new is not None and new.endpoint.created == endpoint.created:
            self._creation.abandon(new)  # the creator receives the error and rolls back its own steps
            return ()
        current = self._registry.get(endpoint.id)
        if current is None or current.created != endpoint.created:
            return ()
        self._registry.remove(current)
        self._recovery.removed(current.id)
        errors = self._realization.remove(current)
        for what, release in self._resources.of(current, addresses=release_address):
            errors.append(self._realization.best_effort(what, release))
        return tuple(filter(None, errors))

    async def wait_scrubbed(self, addresses: Collection[IPAddress]) -> None:
        """Wait until conntrack entries of removed endpoints with these addresses are deleted.

        Otherwise connections of the old endpoint would apply to a new one. Usually returns at once, at the
        latest after SCRUB_TIMEOUT.
        """
        await self._resources.wait_scrubbed(addresses)
