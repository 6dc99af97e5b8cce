"""The endpoints of this node: made, found, regenerated and removed here.

For:   CNI server, REST handlers, endpoint restore.   Needs: the edges of cells.endpoint.kernel.
Gives: Endpoints.
Source: Cilium 1.17, the endpoint manager: states, order of create and delete, lookups.

All but waiting for an identity is synchronous and on the event loop, so nobody ever sees half an endpoint.
"""

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import anyio
from msgspec.structs import replace

from cells.cluster.identity import UNKNOWN, Identities, Identity, NoIdentityError
from cells.cluster.ipcache import Ipcache, prefix_of
from cells.endpoint.kernel.conntrack_scrub import ConntrackScrub
from cells.endpoint.kernel.edges import EndpointAddresses, EndpointMaps, EndpointPrograms
from cells.endpoint.kernel.ipcache import claims_of, resource_of
from cells.endpoint.labels import INIT, EndpointLabels, called_labels, merged_labels
from cells.endpoint.metadata.edges import PodMetadata, PodName
from cells.endpoint.model import Endpoint, EndpointError, EndpointRequest
from cells.endpoint.options.relabel import Relabel
from cells.endpoint.regeneration.builds import Builds
from cells.endpoint.regeneration.recovery import RegenerationRecovery
from cells.endpoint.registry import Registry
from cells.endpoint.state.files import StateFiles
from cells.endpoint.states import Code, Level, State, StatusLog, Subject
from cells.ipam import IPAddress, IpamError
from cells.maps import PolicyIdsExhausted, PoolEmpty
from cells.policy.maps import EndpointPolicies
from lifecycle import HiveError, Logger, Table

_REFUSALS = (OSError, HiveError, NoIdentityError, IpamError)


@dataclass(slots=True, eq=False)
class NewEndpoint:
    """An endpoint whose creation is under way."""

    endpoint: Endpoint
    """As it is while it waits for its identity."""
    request: EndpointRequest
    identity: Identity | None = None
    """None: it has to be waited for, see Endpoints.identify()."""
    waiting: anyio.CancelScope | None = None
    """Of the one who waits."""
    labelled: bool = True
    """Whether the labels of its pod are known; else they are waited for before its identity."""


class Endpoints:
    """Makes endpoints and keeps them; their rows are the ``endpoints`` table.

    The order of every step is such that an agent killed in the middle leaves nothing that a restart
    cannot tell from a working endpoint: policy first, the state file last (the caller brings the link up
    after that), and the reverse when removing.
    """

    def __init__(
        self,
        *,
        table: Table[Endpoint],
        identities: Identities,
        ipcache: Ipcache,
        maps: EndpointMaps,
        programs: EndpointPrograms,
        addresses: EndpointAddresses,
        files: StateFiles,
        scrub: ConntrackScrub,
        recovery: RegenerationRecovery,
        policies: EndpointPolicies,
        pods: PodMetadata,
        verify_source: bool,
        log: Logger,
    ) -> None:
        self.identities = identities
        self.builds = Builds()
        self._registry = Registry(table, log)
        self._ipcache = ipcache
        self._maps = maps
        self._programs = programs
        self._addresses = addresses
        self._files = files
        self._scrub = scrub
        self._recovery = recovery
        self.policies = policies
        self.source_ip_verification = verify_source
        """Whether pods may send from their own addresses only; an endpoint may be exempt."""
        self._pods = pods
        self._relabel = Relabel(self._registry, identities, self._carry)
        self._new: dict[int, NewEndpoint] = {}
        """Those whose creation is under way."""
        self._log = log

    # Looking

    @property
    def table(self) -> Table[Endpoint]:
        """The rows, to watch."""
        return self._registry.table

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
        return endpoint_id in self._new

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
        labels = self._labels_now(request)
        self._registry.check_unused(request.attachment_id, request.addresses)
        try:
            number = self.policies.acquire()
        except PoolEmpty:
            raise
        except PolicyIdsExhausted as error:
            raise EndpointError(500, "no more endpoint IDs available") from error
        except _REFUSALS as error:
            raise EndpointError(500, str(error)) from error
        pool = "" if request.datapath.external_ipam else self._addresses.default_pool
        endpoint = _endpoint(request, number, labels or INIT, pool)
        new = self._new[endpoint.id] = NewEndpoint(endpoint, request, labelled=labels is not None)
        status = self._registry.open_log(endpoint.id)
        status.add(Code.OK, Subject.OTHER, "Endpoint creation", State.WAITING_FOR_IDENTITY, endpoint.created)
        try:
            if labels is not None:
                new.identity = self.identities.acquire_now(labels.identity)
        except NoIdentityError as error:
            self._give_up(new)
            raise EndpointError(500, str(error)) from error
        if new.identity is None:  # else complete() follows before anyone could look
            self._registry.put(endpoint)
        return new

    async def identify(self, new: NewEndpoint) -> None:
        """Wait until the endpoint has its labels and identity; returns at once when it has.

        Raises EndpointError 500 when there is none for it, or it was deleted meanwhile; nothing is left then,
        nor when this is cancelled.
        """
        if new.identity is not None:
            return
        try:
            with anyio.CancelScope() as new.waiting:
                await self._label(new)
                new.identity = await self.identities.acquire(new.endpoint.labels)
        except NoIdentityError as error:
            raise EndpointError(500, str(error)) from error
        finally:
            if new.identity is None:
                self._give_up(new)
        if self._new.get(new.endpoint.id) is not new:
            if new.identity is not None:  # it came in the very moment of the deletion
                self.identities.release(new.identity.id)
            raise EndpointError(500, _DELETED)

    def complete(self, new: NewEndpoint) -> Endpoint:
        """The second half: regenerate it for the first time; it comes back in state ready.

        Synchronous. The link is attached but not brought up: that is the caller's last step. Raises
        EndpointError 500 for a kernel or disk that refuses, or when the endpoint was deleted meanwhile;
        whatever is raised, nothing is left behind.
        """
        began = time.perf_counter()
        if self._new.get(new.endpoint.id) is not new or new.identity is None:
            raise EndpointError(500, _DELETED)
        status = self._registry.status(new.endpoint.id)
        status.add(Code.OK, Subject.OTHER, _IDENTIFIED, State.READY)
        status.add(Code.OK, Subject.OTHER, _triggered(_INITIAL), State.WAITING_TO_REGENERATE)
        status.add(Code.OK, Subject.OTHER, _STARTING, State.REGENERATING)
        identified = replace(new.endpoint, identity=new.identity.id)
        with ExitStack() as undo:
            undo.callback(self._give_up, new)
            try:
                self._build(identified, new, undo)
            except _REFUSALS as error:
                self.builds.count(began, worked=False)
                raise EndpointError(500, str(error)) from error
            undo.pop_all()
        del self._new[identified.id]
        self.builds.count(began, worked=True)
        status.add(Code.OK, Subject.BPF, _regenerated(_INITIAL), State.REGENERATING)
        status.add(Code.OK, Subject.OTHER, _COMPLETED, State.READY)
        ready = replace(identified, state=State.READY)
        # Nobody could see the states in between: all this is one piece of work of the event loop.
        self._registry.put(ready)
        return ready

    def _labels_now(self, request: EndpointRequest) -> EndpointLabels | None:
        """The labels of an endpoint to be; None while its pod is not known. Raises EndpointError 400."""
        called = called_labels(request, self._pods.cluster)
        if not (request.pod_namespace and request.pod_name and self._pods.followed):
            return called
        known = self._pods.lookup(_pod_of(request))
        return None if known is None else merged_labels(request, known)

    async def _label(self, new: NewEndpoint) -> None:
        """Wait for the labels of the pod; without any it begins with reserved:init."""
        if new.labelled:
            return
        known = await self._pods.resolve(_pod_of(new.request))
        labels = merged_labels(new.request, known or ()) if known or new.request.labels else INIT
        new.endpoint = replace(new.endpoint, labels=labels.identity, info_labels=labels.info)
        new.labelled = True
        if self._new.get(new.endpoint.id) is new:
            self._registry.put(new.endpoint)

    async def create(self, request: EndpointRequest) -> Endpoint:
        """Make the endpoint of a link and an address that exist already: begin(), identify(), complete()."""
        new = self.begin(request)
        await self.identify(new)
        return self.complete(new)

    def _build(self, endpoint: Endpoint, new: NewEndpoint, undo: ExitStack) -> None:
        """Make all that an endpoint is in the kernel and on disk; each step's opposite goes to ``undo``."""
        maps, request = self._maps, new.request
        self.policies.realize(endpoint.id, endpoint.identity, endpoint.labels)
        undo.callback(self._quietly, "endpoint config", maps.drop_config, endpoint)
        maps.put_config(endpoint, any_source=self._any_source(endpoint))
        undo.callback(self._quietly, "cilium_lxc", maps.drop_lxc, endpoint)
        maps.put_lxc(endpoint)
        undo.callback(self._quietly, "cilium_ipcache", self._withdraw, endpoint)
        self._ipcache.upsert(*claims_of(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, guarded=endpoint.datapath.guarded)
        undo.callback(self._quietly, "state directory", self._files.remove, endpoint.id)
        self._files.write(endpoint)
        if request.ipv6_expiration_uuid and request.ipv6 is not None:
            self._addresses.stop_expiration(request.ipv6, endpoint.ipv6_pool, request.ipv6_expiration_uuid)
        if request.expiration_uuid and request.ipv4 is not None:
            self._addresses.stop_expiration(request.ipv4, endpoint.pool, request.expiration_uuid)

    def _give_up(self, new: NewEndpoint) -> None:
        """Nothing comes of a creation: number, name and identity are free. Harmless if repeated."""
        if self._new.get(new.endpoint.id) is not new:
            return
        del self._new[new.endpoint.id]
        self._registry.remove(new.endpoint)
        self._quietly("policy map", self.policies.release, new.endpoint.id)
        if new.identity is not None:
            self.identities.release(new.identity.id)
        if new.waiting is not None:
            new.waiting.cancel()

    # Change

    async def relabel(self, endpoint_id: int, wanted: Callable[[Endpoint], EndpointLabels]) -> bool:
        """Give the endpoint the labels ``wanted`` of it, and the identity they stand for; see Relabel.run().

        Whether anything changed: then have it built. Raises EndpointError 500.
        """
        return await self._relabel.run(endpoint_id, wanted)

    def _carry(self, endpoint: Endpoint) -> None:
        """Have the kernel know the endpoint by this row's identity: its peers' policies first, packets last.

        Raises OSError. Where its rules contradict each other the policy it has stays; its build tells.
        """
        try:
            self.policies.realize(endpoint.id, endpoint.identity, endpoint.labels)
        except HiveError as error:
            self._log.warning("policy not realized", endpoint=endpoint.id, error=str(error))
        self._maps.put_lxc(endpoint)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        self._ipcache.upsert(*claims_of(endpoint))

    def realize_policy(self, endpoint_id: int) -> bool:
        """Have the policy map of an endpoint that waits for another identity follow the rules meanwhile.

        Whether it waits; others are regenerated.
        """
        endpoint = self._registry.get(endpoint_id)
        if endpoint is None or endpoint.state is not State.WAITING_FOR_IDENTITY or self.is_new(endpoint_id):
            return False
        self._quietly("policy map", self._write_policy, endpoint)
        return True

    def verify_source(self, endpoint_id: int, verify: bool) -> None:
        """Have the endpoint send from its own addresses only, or from any; with its next build."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is not None:
            datapath = replace(endpoint.datapath, disable_sip_verification=not verify)
            self._registry.put(replace(endpoint, datapath=datapath))

    # Regenerate and restore

    def expose(self, restored: Iterable[Endpoint]) -> None:
        """Make endpoints of before a restart visible, in state restoring; none of them is touched yet."""
        for endpoint in restored:
            status = self._registry.add(endpoint)
            status.add(
                Code.OK, Subject.OTHER, "Restoring endpoint from previous cilium instance", State.RESTORING
            )

    def announce_build(self, endpoint_id: int, reason: str) -> bool:
        """Show that the endpoint is to be built; whether its state allows that."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is None or endpoint.state is State.RESTORING:
            return endpoint is not None
        return self._registry.set_state(endpoint_id, State.WAITING_TO_REGENERATE, _triggered(reason))

    def build(self, endpoint_id: int, level: Level, reason: str) -> str:
        """Make kernel and state file agree with the endpoint's row; what went wrong, empty if all went well.

        The endpoint's build has been announced. What is right already is not written: a running pod notices
        nothing. After a failure the endpoint shows ``not-ready``. Regenerations is who calls this in turn.
        """
        registry = self._registry
        if not registry.set_state(endpoint_id, State.REGENERATING, _STARTING, builder=True):
            return "not to be built"
        endpoint, status = registry.table.get(endpoint_id), registry.status(endpoint_id)
        if endpoint is None:
            return "not there"
        wrong, began = "", time.perf_counter()
        try:
            (self._write_policy if level is Level.POLICY else self._rewrite)(endpoint)
        except Exception as error:  # noqa: BLE001  # one endpoint's must not keep the others from their builds
            wrong = str(error) or type(error).__name__
            message = f"Error regenerating endpoint: {wrong}"
            status.add(Code.FAILURE, Subject.BPF, message, State.REGENERATING)
            self._log.warning(
                "endpoint regeneration failed",
                endpoint=endpoint_id,
                reason=reason,
                level=level.text,
                error=wrong,
                **({} if isinstance(error, _REFUSALS) else {"exc_info": error}),
            )
        else:
            status.add(Code.OK, Subject.BPF, _regenerated(reason), State.REGENERATING)
        self.builds.count(began, worked=not wrong)
        registry.set_state(endpoint_id, State.READY, _COMPLETED, builder=True)
        return wrong

    def _rewrite(self, endpoint: Endpoint) -> None:
        maps = self._maps
        self._write_policy(endpoint)
        maps.put_lxc(endpoint)
        self._ipcache.upsert(*claims_of(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, guarded=endpoint.datapath.guarded)
        self._files.refresh(endpoint)

    def _write_policy(self, endpoint: Endpoint) -> None:
        self.policies.realize(endpoint.id, endpoint.identity, endpoint.labels)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))

    def _any_source(self, endpoint: Endpoint) -> bool:
        return endpoint.datapath.disable_sip_verification or not self.source_ip_verification

    def _withdraw(self, endpoint: Endpoint) -> None:
        self._ipcache.withdraw(resource_of(endpoint.id), map(prefix_of, endpoint.addresses))

    # Delete

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Remove the endpoint from lookups, maps and disk; returns what went wrong, nothing if all went well.

        Every step is tried whatever happened before it. Deleting what is gone does nothing; of one that waits
        for its identity the creation fails, and whoever asked for it keeps the addresses. The link is the
        caller's: without its rows, packets on it are dropped. ``release_address=False`` leaves the addresses
        to the caller too, who releases them once the link is gone; another IPAM's are never released.
        """
        new = self._new.get(endpoint.id)
        if new is not None and new.endpoint.created == endpoint.created:
            self._give_up(new)  # who makes it is told, and takes back what it has made for it
            return ()
        current = self._registry.get(endpoint.id)
        if current is None or current.created != endpoint.created:
            return ()
        self._registry.remove(current)
        self._recovery.gone(current.id)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("cilium_lxc", partial(self._maps.drop_lxc, current)),
            ("cilium_ipcache", partial(self._withdraw, current)),
            ("endpoint config", partial(self._maps.drop_config, current)),
            ("policy map", partial(self.policies.release, current.id)),
            ("identity", partial(self.identities.release, current.identity)),
            ("state directory", partial(self._files.remove, current.id)),
        ]
        for address in current.addresses:
            steps.append(("conntrack", partial(self._scrub.forget_flows, address)))
            if release_address and not current.datapath.external_ipam:
                pool = current.pool_of(address)
                steps.append(("address", partial(self._addresses.release, address, pool)))
        return tuple(error for what, do in steps if (error := self._quietly(what, do)))

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once the flows of removed endpoints with these addresses are forgotten.

        Until then another endpoint with the address would be taken for the old one. Mostly there is nothing
        to wait for; waits no longer than a few seconds.
        """
        await self._scrub.forgotten(addresses)

    def _quietly(self, what: str, do: Callable[..., object], *args: object) -> str:
        """Take one step back; a failure is logged and returned as text, the next step still happens."""
        try:
            do(*args)
        except _REFUSALS as error:
            self._log.warning("endpoint left something behind", what=what, error=str(error))
            return f"{what}: {error}"
        return ""


def _pod_of(request: EndpointRequest) -> PodName:
    return PodName(request.pod_namespace, request.pod_name, request.pod_uid)


def _endpoint(request: EndpointRequest, number: int, labels: EndpointLabels, default_pool: str) -> Endpoint:
    return Endpoint(
        id=number,
        container_id=request.container_id,
        container_ifname=request.container_ifname,
        container_name=request.container_name,
        ifname=request.ifname,
        ifindex=request.ifindex,
        pod_mac=request.pod_mac,
        host_mac=request.host_mac,
        ipv4=request.ipv4,
        pool=(request.pool or default_pool) if request.ipv4 is not None else "",
        ipv6=request.ipv6,
        ipv6_pool=(request.ipv6_pool or default_pool) if request.ipv6 is not None else "",
        network=request.network,
        identity=UNKNOWN,
        labels=labels.identity,
        info_labels=labels.info,
        pod_name=request.pod_name,
        pod_namespace=request.pod_namespace,
        pod_uid=request.pod_uid,
        netns_cookie=request.netns_cookie,
        disable_legacy_identifiers=request.disable_legacy_identifiers,
        datapath=request.datapath,
        state=State.WAITING_FOR_IDENTITY,
        created=time.time(),
    )


def _triggered(reason: str) -> str:
    return f"Triggering endpoint regeneration due to {reason}"


def _regenerated(reason: str) -> str:
    return f"Successfully regenerated endpoint program (Reason: {reason})"


_STARTING = "Starting endpoint regeneration"
_COMPLETED = "Completed endpoint regeneration with no pending regeneration requests"
_IDENTIFIED = "Set identity for this endpoint"
_INITIAL = "Initial build on endpoint creation"
_DELETED = "the endpoint was deleted before it was made"
