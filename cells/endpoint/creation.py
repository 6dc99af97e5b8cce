"""The creation of an endpoint, in two phases: it waits for its identity, then it is built.

Source: Cilium 1.17, the endpoint manager: states, order of creation.

All but waiting for an identity is synchronous and on the event loop, so no one ever sees a half-made
endpoint.
"""

import time
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from msgspec.structs import replace

from cells.base.metrics import Histogram
from cells.cluster.identity.identities import Identities, Identity, NoIdentityError
from cells.cluster.identity.numbers import RESERVED_IDENTITIES, UNKNOWN
from cells.endpoint import model
from cells.endpoint.kernel import REFUSALS, EndpointAddresses, Realization, Undo
from cells.endpoint.labels import INIT, EndpointLabels, called_labels, merged_labels
from cells.endpoint.model import Code, Endpoint, EndpointError, EndpointRequest, State, Subject
from cells.endpoint.pods import MAC_ANNOTATION, PodFacts, PodMetadata, PodName
from cells.endpoint.registry import Registry
from cells.maps.policy_maps import PolicyIdsExhausted, PoolEmpty
from cells.netlink.rows import parse_unicast_mac
from cells.observe.controllers import Controllers, Rules
from cells.policy.maps import EndpointPolicies

# How builds of endpoints went, and how long they took.


class Builds:
    """Every build there was, those at creation too."""

    def __init__(self) -> None:
        self.took = {"success": Histogram(), "failure": Histogram()}
        """Seconds."""

    @property
    def succeeded(self) -> int:
        """How many worked."""
        return self.took["success"].count

    @property
    def failed(self) -> int:
        """How many did not."""
        return self.took["failure"].count

    def count(self, began: float, *, worked: bool) -> None:
        """Count one that began at this perf_counter() and is over."""
        self.took["success" if worked else "failure"].observe(time.perf_counter() - began)


# Retries regenerations that failed.
#
# Source: Cilium 1.17, regeneration recovery: after n x 2 s, linear.

BACKOFF = 2.0
"""Seconds by which the wait before each further attempt grows."""


class RegenerationError(Exception):
    """Raised when an endpoint could not be built once more."""


def controllers_of(endpoint_id: int) -> str:
    """The owner of the endpoint's controllers."""
    return f"endpoint-{endpoint_id}"


class RegenerationRecovery:
    """A controller for each endpoint that failed to build: ``endpoint-<id>-regeneration-recovery``."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers
        self._recovering: set[int] = set()
        """Endpoints with a failed last attempt, or one that still runs."""
        self._recovered: set[int] = set()
        """Endpoints that have the controller: all that ever needed it."""

    def recover(self, endpoint_id: int, attempt: Callable[[int], Awaitable[str]]) -> None:
        """Run ``attempt`` now, and after 2, 4, 6 … seconds, until it succeeds."""
        if endpoint_id in self._recovering:
            return
        self._recovering.add(endpoint_id)
        self._recovered.add(endpoint_id)

        async def retry() -> None:
            wrong = await attempt(endpoint_id)
            if wrong:
                raise RegenerationError(f"regeneration recovery failed: {wrong}")
            self._recovering.discard(endpoint_id)

        name = f"endpoint-{endpoint_id}-regeneration-recovery"
        rules = Rules(retry_base=BACKOFF)
        self._controllers.update(name, retry, rules, owner=controllers_of(endpoint_id))

    def removed(self, endpoint_id: int) -> None:
        """The endpoint is removed: nothing is tried for it any longer."""
        if endpoint_id in self._recovered:
            self._recovered.discard(endpoint_id)
            self._recovering.discard(endpoint_id)
            self._controllers.remove_of(controllers_of(endpoint_id))


class NewEndpoint(msgspec.Struct, eq=False):
    """An endpoint in creation."""

    endpoint: Endpoint
    """As it is while it waits for its identity."""
    request: EndpointRequest
    identity: Identity | None = None
    """None: it has to be waited for, see Endpoints.identify()."""
    waiting: anyio.CancelScope | None = None
    """Of the one who waits."""
    ended: str = model.DELETED
    """Why nothing comes of it, once it is given up."""
    labelled: bool = True
    """Whether the labels of its pod are known; else they are waited for before its identity."""


class EndpointCreation:
    """Makes endpoints; those in creation are known by their numbers."""

    def __init__(
        self,
        registry: Registry,
        identities: Identities,
        policies: EndpointPolicies,
        realization: Realization,
        addresses: EndpointAddresses,
        builds: Builds,
        pods: PodMetadata,
    ) -> None:
        self._registry = registry
        self._identities = identities
        self._policies = policies
        self._realization = realization
        self._addresses = addresses
        self._builds = builds
        self._pods = pods
        self._new: dict[int, NewEndpoint] = {}

    def of(self, endpoint_id: int) -> NewEndpoint | None:
        """The creation under way of the endpoint with this number."""
        return self._new.get(endpoint_id)

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """The first half: the endpoint has a number; it is listed if its identity is to come.

        Raises EndpointError 400 for a request that cannot be met and 500 for a kernel that refuses, PoolEmpty
        when no policy map is prepared (await PolicyMaps.ready() and call again).
        """
        if self._realization.own_routes:
            request = replace(request, datapath=request.datapath.with_endpoint_routes(wanted=True))
        known = self._known_now(request)
        labels, mac = self._labels_now(request, known), _mac(request, known)
        self._registry.check_unused(request.attachment_id, request.addresses)
        try:
            number = self._policies.acquire()
        except PoolEmpty:
            raise
        except PolicyIdsExhausted as error:
            raise EndpointError(500, "no more endpoint IDs available") from error
        except REFUSALS as error:
            raise EndpointError(500, str(error)) from error
        pool = "" if request.datapath.external_ipam else self._addresses.default_pool
        endpoint = _endpoint(request, number, labels or INIT, pool, mac=mac)
        self._supersede(endpoint)
        new = self._new[endpoint.id] = NewEndpoint(endpoint, request, labelled=labels is not None)
        self._registry.open_log(endpoint.id).add(
            Code.OK, Subject.OTHER, model.CREATED, State.WAITING_FOR_IDENTITY, endpoint.created
        )
        try:
            if labels is not None:
                new.identity = self._identities.acquire_now(labels.identity)
        except NoIdentityError as error:
            self.give_up(new)
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
                new.identity = await self._identities.acquire(new.endpoint.labels)
        except NoIdentityError as error:
            raise EndpointError(500, str(error)) from error
        finally:
            if new.identity is None:
                self.give_up(new)
        if self._new.get(new.endpoint.id) is not new:
            if new.identity is not None:  # it came in the very moment of the deletion
                self._identities.release(new.identity.id)
            raise EndpointError(500, new.ended)

    def complete(self, new: NewEndpoint) -> Endpoint:
        """The second half: regenerate it for the first time; it comes back in state ready.

        Synchronous. The link is attached but not brought up: that is the caller's last step. Raises
        EndpointError 500 for a kernel or disk that refuses, or when the endpoint was deleted meanwhile;
        whatever is raised, nothing is left behind.
        """
        began = time.perf_counter()
        if self._new.get(new.endpoint.id) is not new or new.identity is None:
            raise EndpointError(500, new.ended)
        # The states in between are visible to none: all this runs without a pause of the event loop.
        ready = replace(new.endpoint, identity=new.identity.id, state=State.READY)
        status, now = self._registry.status(ready.id), time.time()
        for message, state in model.FIRST_BUILD:
            status.add(Code.OK, Subject.OTHER, message, state, now)
        undo: Undo = []
        try:
            self._realization.make(ready, undo)
            self._stop_expirations(new.request)
        except BaseException as error:
            self._realization.take_back(undo, ready)
            self.give_up(new)
            if not isinstance(error, REFUSALS):
                raise
            self._builds.count(began, worked=False)
            raise EndpointError(500, str(error)) from error
        del self._new[ready.id]
        self._builds.count(began, worked=True)
        now = time.time()
        status.add(Code.OK, Subject.BPF, model.FIRST_BUILT, State.REGENERATING, now)
        status.add(Code.OK, Subject.OTHER, model.COMPLETED, State.READY, now)
        self._registry.put(ready)
        return ready

    def give_up(self, new: NewEndpoint) -> None:
        """Nothing comes of a creation: number, name and identity are free. Harmless if repeated."""
        if self._new.get(new.endpoint.id) is not new:
            return
        del self._new[new.endpoint.id]
        self._registry.remove(new.endpoint)
        self._realization.quietly("policy map", self._policies.release, new.endpoint.id)
        if new.identity is not None:
            self._identities.release(new.identity.id)
        if new.waiting is not None:
            new.waiting.cancel()

    def _supersede(self, endpoint: Endpoint) -> None:
        """Give up the creation of an earlier endpoint of the pod: the runtime has another sandbox for it."""
        for new in list(self._new.values()) if endpoint.pod_name else ():
            before = new.endpoint
            if (before.pod_namespace, before.cep_name) == (endpoint.pod_namespace, endpoint.cep_name):
                new.ended = model.SUPERSEDED
                self.give_up(new)

    def _known_now(self, request: EndpointRequest) -> PodFacts | None:
        """What is known of the pod of an endpoint to be; None: nothing yet, or it has none."""
        return self._pods.lookup(_pod_of(request)) if self._has_pod(request) else None

    def _has_pod(self, request: EndpointRequest) -> bool:
        """Whether an object of its pod is to be expected."""
        named = request.pod_namespace and request.pod_name and not request.reserved
        return bool(named) and self._pods.followed

    def _labels_now(self, request: EndpointRequest, known: PodFacts | None) -> EndpointLabels | None:
        """The labels of an endpoint to be; None while its pod is not known. Raises EndpointError 400."""
        if request.reserved:
            return EndpointLabels(RESERVED_IDENTITIES[request.reserved])
        called = called_labels(request, self._pods.cluster, self._identities.filter)
        if not self._has_pod(request):
            return called
        return None if known is None else merged_labels(request, known.labels, self._identities.filter)

    async def _label(self, new: NewEndpoint) -> None:
        """Wait for the pod: its labels, without any it begins with reserved:init, and its MAC address."""
        if new.labelled:
            return
        known = await self._pods.resolve(_pod_of(new.request))
        labels = INIT
        if known or new.request.labels:
            labels = merged_labels(new.request, known.labels if known else (), self._identities.filter)
        mac = _mac(new.request, known)
        new.endpoint = replace(new.endpoint, labels=labels.identity, info_labels=labels.info, pod_mac=mac)
        new.labelled = True
        if self._new.get(new.endpoint.id) is new:
            self._registry.put(new.endpoint)

    def _stop_expirations(self, request: EndpointRequest) -> None:
        """The addresses are in use: they stay. Raises IpamError when no such timer runs."""
        for address, pool, uuid in (
            (request.ipv6, request.ipv6_pool, request.ipv6_expiration_uuid),
            (request.ipv4, request.pool, request.expiration_uuid),
        ):
            if uuid and address is not None:
                self._addresses.stop_expiration(address, pool or self._addresses.default_pool, uuid)


def _pod_of(request: EndpointRequest) -> PodName:
    return PodName(request.pod_namespace, request.pod_name, request.pod_uid)


def _mac(request: EndpointRequest, pod: PodFacts | None) -> bytes:
    """The MAC address that the pod's annotation asks for, else the one it has. Raises EndpointError 400."""
    if pod is None or not pod.mac:
        return request.pod_mac
    try:
        return parse_unicast_mac(pod.mac)
    except ValueError as error:
        raise EndpointError(400, f"pod annotation {MAC_ANNOTATION}: {error}") from error


def _endpoint(
    request: EndpointRequest, number: int, labels: EndpointLabels, default_pool: str, *, mac: bytes
) -> Endpoint:
    return Endpoint(
        id=number,
        container_id=request.container_id,
        container_ifname=request.container_ifname,
        container_name=request.container_name,
        ifname=request.ifname,
        ifindex=request.ifindex,
        pod_mac=mac,
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
