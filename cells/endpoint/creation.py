"""Creates endpoints in two phases: first the wait for an identity, then the build.

``Endpoints`` (``manager``) calls ``EndpointCreation``. Everything except the wait is synchronous on the event
loop, so other tasks never observe a partly built endpoint.

Source: Cilium 1.17, pkg/endpoint and pkg/endpointmanager: states and order of creation.
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
from cells.endpoint.kernel import REALIZATION_ERRORS, EndpointAddresses, Realization, Undo
from cells.endpoint.labels import INIT, EndpointLabels, merged_labels, request_labels
from cells.endpoint.model import Code, Endpoint, EndpointError, EndpointRequest, State, Subject
from cells.endpoint.pods import MAC_ANNOTATION, PodFacts, PodMetadata, PodName
from cells.endpoint.registry import Registry
from cells.maps.policy_maps import PolicyIdsExhausted, PoolEmpty
from cells.netlink.rows import parse_unicast_mac
from cells.observe.controllers import Controllers, Rules
from cells.policy.maps import EndpointPolicies

# Counts and durations of regenerations.


class Builds:
    """Counts regenerations of endpoints, including the first one at creation."""

    def __init__(self) -> None:
        self.took = {"success": Histogram(), "failure": Histogram()}
        """Durations in seconds, by outcome."""

    @property
    def succeeded(self) -> int:
        """Number of successful builds."""
        return self.took["success"].count

    @property
    def failed(self) -> int:
        """Number of failed builds."""
        return self.took["failure"].count

    def count(self, began: float, *, success: bool) -> None:
        """Record a finished build that started at ``began`` (time.perf_counter())."""
        self.took["success" if success else "failure"].observe(time.perf_counter() - began)


# Retries of failed regenerations.
#
# Source: Cilium 1.17, regeneration recovery: after n x 2 s, linear.

BACKOFF = 2.0
"""Seconds; the pause before a retry grows by this much with each failure."""


class RegenerationError(Exception):
    """Raised if a retried regeneration fails again."""


def controllers_of(endpoint_id: int) -> str:
    """Return the owner name of the endpoint's controllers."""
    return f"endpoint-{endpoint_id}"


class RegenerationRecovery:
    """Retries failed regenerations, with the controllers ``endpoint-<id>-regeneration-recovery``."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers
        self._recovering: set[int] = set()
        """Endpoints with retries in progress."""
        self._recovered: set[int] = set()
        """Endpoints with a controller, which stays registered after a success."""

    def recover(self, endpoint_id: int, attempt: Callable[[int], Awaitable[str]]) -> None:
        """Call ``attempt`` now, and after 2, 4, 6 … seconds, until it returns no error."""
        if endpoint_id in self._recovering:
            return
        self._recovering.add(endpoint_id)
        self._recovered.add(endpoint_id)

        async def retry() -> None:
            error = await attempt(endpoint_id)
            if error:
                raise RegenerationError(f"regeneration recovery failed: {error}")
            self._recovering.discard(endpoint_id)

        name = f"endpoint-{endpoint_id}-regeneration-recovery"
        rules = Rules(retry_base=BACKOFF)
        group = "endpoint-regeneration-recovery"
        self._controllers.update(name, retry, rules, owner=controllers_of(endpoint_id), group=group)

    def removed(self, endpoint_id: int) -> None:
        """Stop the retries of a removed endpoint."""
        if endpoint_id in self._recovered:
            self._recovered.discard(endpoint_id)
            self._recovering.discard(endpoint_id)
            self._controllers.remove_of(controllers_of(endpoint_id))


class NewEndpoint(msgspec.Struct, eq=False):
    """An endpoint in creation."""

    endpoint: Endpoint
    """The row to list while the endpoint waits for its identity."""
    request: EndpointRequest
    identity: Identity | None = None
    """None until an identity is allocated: call Endpoints.identify()."""
    waiting: anyio.CancelScope | None = None
    """The cancel scope of the wait for the identity."""
    abandon_reason: str = model.DELETED
    """The error for the requester if the creation is abandoned."""
    has_labels: bool = True
    """Whether the pod's labels are received; otherwise identify() waits for them first."""


class EndpointCreation:
    """Creates endpoints; stores creations in progress by endpoint id."""

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
        self._creations: dict[int, NewEndpoint] = {}

    def of(self, endpoint_id: int) -> NewEndpoint | None:
        """Return the creation in progress with this endpoint id, or None."""
        return self._creations.get(endpoint_id)

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """First phase: allocate an id, and an identity if one is available without waiting.

        An endpoint that must wait for its identity is listed. Raises EndpointError 400 for an invalid request
        and 500 if the kernel rejects a step; PoolEmpty if no policy map is prepared (await PolicyMaps.ready()
        and call again).
        """
        if self._realization.endpoint_routes:
            request = replace(request, datapath=request.datapath.with_endpoint_routes(wanted=True))
        pod = self._received_pod(request)
        labels, mac = self._received_labels(request, pod), _mac(request, pod)
        self._registry.check_unused(request.attachment_id, request.addresses)
        try:
            number = self._policies.acquire()
        except PoolEmpty:
            raise
        except PolicyIdsExhausted as error:
            raise EndpointError(500, "no more endpoint IDs available") from error
        except REALIZATION_ERRORS as error:
            raise EndpointError(500, str(error)) from error
        pool = "" if request.datapath.external_ipam else self._addresses.default_pool
        endpoint = _endpoint(request, number, labels or INIT, pool, mac=mac)
        self._abandon_superseded(endpoint)
        new = self._creations[endpoint.id] = NewEndpoint(endpoint, request, has_labels=labels is not None)
        self._registry.open_log(endpoint.id).add(
            Code.OK, Subject.OTHER, model.CREATED, State.WAITING_FOR_IDENTITY, endpoint.created
        )
        try:
            if labels is not None:
                new.identity = self._identities.acquire_now(labels.identity)
        except NoIdentityError as error:
            self.abandon(new)
            raise EndpointError(500, str(error)) from error
        if new.identity is None:  # otherwise complete() follows before other tasks run
            self._registry.put(endpoint)
        return new

    async def identify(self, new: NewEndpoint) -> None:
        """Wait until the endpoint has labels and an identity.

        Raises EndpointError 500 if no identity can be allocated, or the endpoint was deleted meanwhile. After
        an error or a cancellation, all state of the endpoint is removed.
        """
        if new.identity is not None:
            return
        try:
            with anyio.CancelScope() as new.waiting:
                await self._wait_for_labels(new)
                new.identity = await self._identities.acquire(new.endpoint.labels)
        except NoIdentityError as error:
            raise EndpointError(500, str(error)) from error
        finally:
            if new.identity is None:
                self.abandon(new)
        if self._creations.get(new.endpoint.id) is not new:
            if new.identity is not None:  # allocated just as the endpoint was deleted
                self._identities.release(new.identity.id)
            raise EndpointError(500, new.abandon_reason)

    def complete(self, new: NewEndpoint) -> Endpoint:
        """Second phase: build the endpoint; return it in state ready.

        Synchronous. Attaches the program but leaves the link down: the caller sets the link up last. Raises
        EndpointError 500 if a step fails in the kernel or on disk, or the endpoint was deleted meanwhile.
        After an error, all state of the endpoint is removed.
        """
        began = time.perf_counter()
        if self._creations.get(new.endpoint.id) is not new or new.identity is None:
            raise EndpointError(500, new.abandon_reason)
        # Intermediate states are only logged: no other task runs until the endpoint is ready.
        ready = replace(new.endpoint, identity=new.identity.id, state=State.READY)
        status, now = self._registry.status(ready.id), time.time()
        for message, state in model.FIRST_BUILD:
            status.add(Code.OK, Subject.OTHER, message, state, now)
        undo: Undo = []
        try:
            self._realization.create(ready, undo)
            self._stop_expirations(new.request)
        except BaseException as error:
            self._realization.roll_back(undo, ready)
            self.abandon(new)
            if not isinstance(error, REALIZATION_ERRORS):
                raise
            self._builds.count(began, success=False)
            raise EndpointError(500, str(error)) from error
        del self._creations[ready.id]
        self._builds.count(began, success=True)
        now = time.time()
        status.add(Code.OK, Subject.BPF, model.FIRST_BUILT, State.REGENERATING, now)
        status.add(Code.OK, Subject.OTHER, model.COMPLETED, State.READY, now)
        self._registry.put(ready)
        return ready

    def abandon(self, new: NewEndpoint) -> None:
        """Abandon a creation: release its id, names and identity. A second call is a no-op."""
        if self._creations.get(new.endpoint.id) is not new:
            return
        del self._creations[new.endpoint.id]
        self._registry.remove(new.endpoint)
        self._realization.best_effort("policy map", self._policies.release, new.endpoint.id)
        if new.identity is not None:
            self._identities.release(new.identity.id)
        if new.waiting is not None:
            new.waiting.cancel()

    def _abandon_superseded(self, endpoint: Endpoint) -> None:
        """Abandon the creation of an earlier endpoint of the pod: the runtime has a new sandbox."""
        for new in list(self._creations.values()) if endpoint.pod_name else ():
            before = new.endpoint
            if (before.pod_namespace, before.cep_name) == (endpoint.pod_namespace, endpoint.cep_name):
                new.abandon_reason = model.SUPERSEDED
                self.abandon(new)

    def _received_pod(self, request: EndpointRequest) -> PodFacts | None:
        """Return labels and MAC address of the pod; None without a pod or before its object is received."""
        return self._pods.lookup(_pod_of(request)) if self._has_pod(request) else None

    def _has_pod(self, request: EndpointRequest) -> bool:
        """Whether the endpoint is a pod's, and a source of pod objects is configured."""
        named = request.pod_namespace and request.pod_name and not request.reserved
        return bool(named) and self._pods.followed

    def _received_labels(self, request: EndpointRequest, pod: PodFacts | None) -> EndpointLabels | None:
        """Return the labels of the new endpoint; None until its pod is received.

        Raises EndpointError 400.
        """
        if request.reserved:
            return EndpointLabels(RESERVED_IDENTITIES[request.reserved])
        called = request_labels(request, self._pods.cluster, self._identities.filter)
        if not self._has_pod(request):
            return called
        return None if pod is None else merged_labels(request, pod.labels, self._identities.filter)

    async def _wait_for_labels(self, new: NewEndpoint) -> None:
        """Wait for the pod's MAC address and labels, which are reserved:init without a pod object."""
        if new.has_labels:
            return
        pod = await self._pods.resolve(_pod_of(new.request))
        labels = INIT
        if pod or new.request.labels:
            labels = merged_labels(new.request, pod.labels if pod else (), self._identities.filter)
        mac = _mac(new.request, pod)
        new.endpoint = replace(new.endpoint, labels=labels.identity, info_labels=labels.info, pod_mac=mac)
        new.has_labels = True
        if self._creations.get(new.endpoint.id) is new:
            self._registry.put(new.endpoint)

    def _stop_expirations(self, request: EndpointRequest) -> None:
        """Stop the expiration of the addresses. Raises IpamError if a timer does not exist."""
        for address, pool, uuid in (
            (request.ipv6, request.ipv6_pool, request.ipv6_expiration_uuid),
            (request.ipv4, request.pool, request.expiration_uuid),
        ):
            if uuid and address is not None:
                self._addresses.stop_expiration(address, pool or self._addresses.default_pool, uuid)


def _pod_of(request: EndpointRequest) -> PodName:
    return PodName(request.pod_namespace, request.pod_name, request.pod_uid)


def _mac(request: EndpointRequest, pod: PodFacts | None) -> bytes:
    """Return the MAC address of the pod's annotation, else that of the request.

    Raises EndpointError 400.
    """
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
