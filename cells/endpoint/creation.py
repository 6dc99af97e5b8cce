"""Creation of an endpoint in two phases: it waits for its identity, then it is built.

Source: Cilium 1.17, the endpoint manager: states, order of creation.

Everything except the wait for an identity is synchronous on the event loop, so other tasks never see a partly
built endpoint.
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

# Outcomes and durations of builds.


class Builds:
    """Counts regenerations of endpoints, including the first one at creation."""

    def __init__(self) -> None:
        self.took = {"success": Histogram(), "failure": Histogram()}
        """Duration in seconds."""

    @property
    def succeeded(self) -> int:
        """Number of successful builds."""
        return self.took["success"].count

    @property
    def failed(self) -> int:
        """Number of failed builds."""
        return self.took["failure"].count

    def count(self, began: float, *, worked: bool) -> None:
        """Count a build that has ended; ``began`` is its start by time.perf_counter()."""
        self.took["success" if worked else "failure"].observe(time.perf_counter() - began)


# Retries of failed regenerations.
#
# Source: Cilium 1.17, regeneration recovery: after n x 2 s, linear.

BACKOFF = 2.0
"""Seconds; each attempt waits this much longer than the one before."""


class RegenerationError(Exception):
    """Raised if a retried regeneration fails again."""


def controllers_of(endpoint_id: int) -> str:
    """Name of the owner of the endpoint's controllers."""
    return f"endpoint-{endpoint_id}"


class RegenerationRecovery:
    """Retries failed regenerations: controllers ``endpoint-<id>-regeneration-recovery``."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers
        self._recovering: set[int] = set()
        """Endpoints that are being retried."""
        self._recovered: set[int] = set()
        """Endpoints with a controller, which stays after a success."""

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
    """The row to show while the endpoint waits for its identity."""
    request: EndpointRequest
    identity: Identity | None = None
    """None if no identity is assigned yet: call Endpoints.identify()."""
    waiting: anyio.CancelScope | None = None
    """Cancels the wait for the identity."""
    ended: str = model.DELETED
    """The error for the requester if the creation is abandoned."""
    labelled: bool = True
    """Whether the labels of the pod are received. If not, identify() waits for them first."""


class EndpointCreation:
    """Creates endpoints; creations in progress are stored by endpoint id."""

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
        """The creation in progress with this endpoint id."""
        return self._new.get(endpoint_id)

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """First phase: allocate an id, and an identity if one is available at once.

        The endpoint is listed if it has to wait for its identity. Raises EndpointError 400 for an invalid
        request and 500 if the kernel refuses; PoolEmpty if no policy map is prepared (await
        PolicyMaps.ready() and call again).
        """
        if self._realization.own_routes:
            request = replace(request, datapath=request.datapath.with_endpoint_routes(wanted=True))
        pod = self._pod_now(request)
        labels, mac = self._labels_now(request, pod), _mac(request, pod)
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
        if new.identity is None:  # otherwise complete() follows before other tasks run
            self._registry.put(endpoint)
        return new

    async def identify(self, new: NewEndpoint) -> None:
        """Wait until the endpoint has labels and an identity; return at once if it has both.

        Raises EndpointError 500 if no identity can be allocated, or the endpoint was deleted meanwhile. After
        an error or a cancellation nothing of the endpoint is left.
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
            if new.identity is not None:  # allocated just as the endpoint was deleted
                self._identities.release(new.identity.id)
            raise EndpointError(500, new.ended)

    def complete(self, new: NewEndpoint) -> Endpoint:
        """Second phase: build the endpoint; return it in state ready.

        Synchronous. Attaches the program but leaves the link down: the caller sets the link up last. Raises
        EndpointError 500 if the kernel or the disk refuses, or the endpoint was deleted meanwhile. After any
        error nothing of the endpoint is left.
        """
        began = time.perf_counter()
        if self._new.get(new.endpoint.id) is not new or new.identity is None:
            raise EndpointError(500, new.ended)
        # Intermediate states are only logged: no other task runs until the endpoint is ready.
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
        """Abandon a creation: free its id, names and identity. A second call is a no-op."""
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
        """Abandon the creation of an earlier endpoint of the pod: the runtime has created another sandbox."""
        for new in list(self._new.values()) if endpoint.pod_name else ():
            before = new.endpoint
            if (before.pod_namespace, before.cep_name) == (endpoint.pod_namespace, endpoint.cep_name):
                new.ended = model.SUPERSEDED
                self.give_up(new)

    def _pod_now(self, request: EndpointRequest) -> PodFacts | None:
        """Labels and MAC address of the pod, if its object is received; None if not, or without a pod."""
        return self._pods.lookup(_pod_of(request)) if self._has_pod(request) else None

    def _has_pod(self, request: EndpointRequest) -> bool:
        """Whether the endpoint has a pod, and a source of pod objects is configured."""
        named = request.pod_namespace and request.pod_name and not request.reserved
        return bool(named) and self._pods.followed

    def _labels_now(self, request: EndpointRequest, pod: PodFacts | None) -> EndpointLabels | None:
        """Labels of the new endpoint; None until its pod is received. Raises EndpointError 400."""
        if request.reserved:
            return EndpointLabels(RESERVED_IDENTITIES[request.reserved])
        called = called_labels(request, self._pods.cluster, self._identities.filter)
        if not self._has_pod(request):
            return called
        return None if pod is None else merged_labels(request, pod.labels, self._identities.filter)

    async def _label(self, new: NewEndpoint) -> None:
        """Wait for the pod's labels (reserved:init if it has none) and MAC address."""
        if new.labelled:
            return
        pod = await self._pods.resolve(_pod_of(new.request))
        labels = INIT
        if pod or new.request.labels:
            labels = merged_labels(new.request, pod.labels if pod else (), self._identities.filter)
        mac = _mac(new.request, pod)
        new.endpoint = replace(new.endpoint, labels=labels.identity, info_labels=labels.info, pod_mac=mac)
        new.labelled = True
        if self._new.get(new.endpoint.id) is new:
            self._registry.put(new.endpoint)

    def _stop_expirations(self, request: EndpointRequest) -> None:
        """Keep the addresses allocated. Raises IpamError if an expiration timer does not exist."""
        for address, pool, uuid in (
            (request.ipv6, request.ipv6_pool, request.ipv6_expiration_uuid),
            (request.ipv4, request.pool, request.expiration_uuid),
        ):
            if uuid and address is not None:
                self._addresses.stop_expiration(address, pool or self._addresses.default_pool, uuid)


def _pod_of(request: EndpointRequest) -> PodName:
    return PodName(request.pod_namespace, request.pod_name, request.pod_uid)


def _mac(request: EndpointRequest, pod: PodFacts | None) -> bytes:
    """MAC address of the pod's annotation, or else of the request. Raises EndpointError 400."""
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
