"""Frontends and backend states set through the API, in addition to Kubernetes objects.

``ManualServices`` checks requests and puts rows in the tables ``manual-services`` and ``backend-states``,
which ``ServiceWatch`` applies. A manual frontend lasts until an object changes the same frontend, or the
agent restarts.

Source: Cilium 1.17, PUT and DELETE of /service/{id}: status codes and error messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import anyio
import msgspec

from cells.config import AgentConfig
from cells.kubernetes.settings import ObjectSource
from cells.services import (
    ANY_PROTOCOL,
    INTERNAL,
    PROTOCOLS,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control.tables import ServedFrontend
from cells.services.model.backends import addresses_of
from lifecycle import ReadTable, Table
from lifecycle.http import Refusal

WRITE_TIMEOUT = 10.0
"""Seconds that a request waits for the maps to be written."""

_TRANSITIONS = {
    BackendState.ACTIVE: frozenset(BackendState),
    BackendState.TERMINATING: frozenset({BackendState.TERMINATING}),
    BackendState.QUARANTINED: frozenset(
        {BackendState.ACTIVE, BackendState.TERMINATING, BackendState.QUARANTINED}
    ),
    BackendState.MAINTENANCE: frozenset({BackendState.ACTIVE, BackendState.MAINTENANCE}),
}


class ManualService(msgspec.Struct, frozen=True):
    """A row of the table ``manual-services``: the last manual setting of a frontend."""

    key: FrontendKey
    turn: int
    """Increases with every call, so that repeated calls change the row, too."""
    frontend: Frontend | None
    """None: not served."""


class ManualState(msgspec.Struct, frozen=True):
    """A row of the table ``backend-states``: the last manual state of a backend."""

    address: ServiceAddress
    turn: int
    state: BackendState


def manual_services() -> Table[FrontendKey, ManualService]:
    """Create the table ``manual-services``, by address and scope."""
    return Table("manual-services", key=lambda one: one.key)


def manual_states() -> Table[ServiceAddress, ManualState]:
    """Create the table ``backend-states``, by address."""
    return Table("backend-states", key=lambda one: one.address)


class RequestedService(msgspec.Struct, frozen=True):
    """A frontend in a request; bpf-lb-proto-diff=false ignores its protocol."""

    number: int
    key: FrontendKey
    type: ServiceType
    backends: tuple[Backend, ...]
    name: ServiceName
    ext_local: bool = False
    int_local: bool = False
    health_check_node_port: int = 0


def frontend_of(requested: RequestedService, node_name: str, options: LoadBalancerOptions) -> Frontend:
    """Return the requested frontend, with the backends that its traffic policy allows on this node."""
    key = _of_protocol(requested.key.address, options)
    outside = requested.type in _TWO_SCOPE_TYPES
    local = requested.ext_local
    if requested.type is ServiceType.CLUSTER_IP or requested.key.scope == INTERNAL:
        local = requested.int_local
    if requested.type is ServiceType.HOST_PORT:
        local = False
    backends = [one for one in requested.backends if not local or one.node in ("", node_name)]
    return Frontend(
        key=FrontendKey(key, requested.key.scope),
        type=requested.type,
        service=requested.name,
        backends=tuple(
            msgspec.structs.replace(one, address=_of_protocol(one.address, options), manual=True)
            for one in backends
        ),
        ext_local=requested.ext_local,
        int_local=requested.int_local,
        health_check_node_port=requested.health_check_node_port,
        two_scopes=outside and requested.ext_local != requested.int_local,
        routable=int(key.ip) != 0
        and (requested.type is not ServiceType.CLUSTER_IP or options.bpf_lb_external_clusterip),
        number=requested.number,
    )


_TWO_SCOPE_TYPES = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER, ServiceType.EXTERNAL_IPS)


def _of_protocol(address: ServiceAddress, options: LoadBalancerOptions) -> ServiceAddress:
    return address if options.bpf_lb_proto_diff else ServiceAddress(address.ip, address.port)


class ManualServices:
    """Sets manual services and states; the only writer of both tables.

    Methods raise Refusal with the status that Cilium returns.
    """

    def __init__(
        self,
        services: Table[FrontendKey, ManualService],
        states: Table[ServiceAddress, ManualState],
        served: Table[FrontendKey, ServedFrontend],
        options: LoadBalancerOptions,
        objects: ObjectSource,
        agent: AgentConfig,
    ) -> None:
        self.services: ReadTable[FrontendKey, ManualService] = services
        self.states: ReadTable[ServiceAddress, ManualState] = states
        self._services = services
        self._states = states
        self._served = served
        self._options = options
        self._maps_written = objects is not ObjectSource.NOWHERE
        self._agent = agent
        self._revision = 0

    async def put(self, requested: RequestedService) -> bool:
        """Set a frontend by its ID and wait until it is in the maps; return whether it is new."""
        self.check_followed()
        if not self._options.serves(requested.key.address.ip):
            raise Refusal(500, f"IPv{requested.key.address.version} is off on this node")
        frontend = frontend_of(requested, self._agent.node_name, self._options)
        created = check_frontend(frontend, self._served.all())
        before = self._services.get(frontend.key)
        row = self._override(frontend.key, frontend)
        with anyio.move_on_after(WRITE_TIMEOUT):
            await self._served.wait_for(frontend.key, lambda row: _is_served(row.frontend, frontend))
            return created
        if self._services.get(frontend.key) == row:
            with self._services.txn() as rows:
                if before is not None:
                    rows.put(msgspec.structs.replace(before, turn=self._next_revision()))
                else:
                    rows.delete(frontend.key)
        text = "as it was asked for is not in the maps"
        raise Refusal(500, f"{frontend.key} {text} after {WRITE_TIMEOUT:g} s: see hive status --verbose")

    async def delete(self, number: int) -> bool:
        """Remove a frontend. Returns once it is out of the maps: whether it existed."""
        found = next((one for one in self._served.all() if one.id == number), None)
        if found is None:
            return False
        self.check_followed()
        self._override(found.key, None)
        with anyio.move_on_after(WRITE_TIMEOUT):
            await self._served.wait_removed(found.key)
            return True
        raise Refusal(500, f"{found.key} is still in the maps after {WRITE_TIMEOUT:g} s")

    async def set_states(self, backends: Sequence[Backend]) -> None:
        """Set the states of backends in all frontends; unknown backends are ignored."""
        self.check_followed()
        served = self._served.all()
        known = {one.address: one for one in check_states(backends, served)}
        with self._states.txn() as rows:
            for backend in known.values():
                rows.put(ManualState(backend.address, self._next_revision(), backend.state))
        having = [one.key for one in _serving(known, served)]
        with anyio.move_on_after(WRITE_TIMEOUT):
            for key in having:
                await self._served.wait_for(key, lambda row: _have_states(row.in_maps, known))
            return
        raise Refusal(500, f"not in the maps after {WRITE_TIMEOUT:g} s: see hive status --verbose")

    def _override(self, key: FrontendKey, frontend: Frontend | None) -> ManualService:
        row = ManualService(key, self._next_revision(), frontend)
        self._services.put(row)
        return row

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def check_followed(self) -> None:
        """Raise Refusal without a source of objects, as the maps are not written then."""
        if not self._maps_written:
            raise Refusal(
                501,
                "services of an earlier agent stay as they are, and none can be added through the API: no"
                " source of objects is set (k8s-api-server, k8s-kubeconfig-path or manifests-dir)",
            )


def _is_served(served: Frontend, wanted: Frontend) -> bool:
    """Whether the frontend is in the maps, ignoring backends' states, which are set separately."""
    have, want = ({one.address for one in each.backends} for each in (served, wanted))
    bare = [msgspec.structs.replace(each, backends=()) for each in (served, wanted)]
    return have == want and bare[0] == bare[1]


def _have_states(served: Frontend, wanted: Mapping[ServiceAddress, Backend]) -> bool:
    return all(one.state is wanted[one.address].state for one in served.backends if one.address in wanted)


def check_frontend(frontend: Frontend, served: Sequence[ServedFrontend]) -> bool:
    """Whether the frontend is new. Raises Refusal for a conflict of numbers or families."""
    key, number = frontend.key, frontend.number
    versions = {one.address.version for one in frontend.backends}
    if versions - {key.address.version}:
        raise Refusal(500, f"Unable to upsert service {key} as NAT46/64 is disabled")
    for one in served:
        if one.key == key and one.id != number:
            text = "the service provided is already registered with ID"
            raise Refusal(460, f"{text} {one.id}, please use that ID instead of {number}")
    for one in served:
        if one.id == number and one.key != key:
            raise Refusal(
                500,
                f"Unable to allocate service ID {number} for {key}: Service ID {number} is already registered"
                f' to "{one.key}"',
            )
    return all(one.key != key for one in served)


def check_states(backends: Sequence[Backend], served: Sequence[ServedFrontend]) -> list[Backend]:
    """Select the backends in use; a backend without a protocol means those of all protocols.

    Raises Refusal for an invalid transition of states.
    """
    asked = {address for one in backends for address in _all_protocols(one.address)}
    now = {
        each.address: each.state
        for one in _serving(asked, served)
        for each in one.in_maps.backends
        if each.address in asked
    }
    known = [
        msgspec.structs.replace(one, address=address)
        for one in backends
        for address in _all_protocols(one.address)
        if address in now
    ]
    invalid = [one for one in known if one.state not in _TRANSITIONS[now[one.address]]]
    if invalid:
        raise Refusal(501, "\n".join(_invalid_transition(one, now[one.address]) for one in invalid))
    return known


def _all_protocols(address: ServiceAddress) -> Iterable[ServiceAddress]:
    """Return the address; if it has no protocol, its addresses for every protocol."""
    if address.protocol != ANY_PROTOCOL:
        return (address,)
    return [ServiceAddress(address.ip, address.port, protocol) for protocol in PROTOCOLS.values()]


def _serving(addresses: Collection[bytes], served: Iterable[ServedFrontend]) -> Iterator[ServedFrontend]:
    """Return the frontends with any of these backends."""
    wanted = frozenset(addresses)
    return (one for one in served if not wanted.isdisjoint(addresses_of(one.in_maps.backends)))


def _invalid_transition(backend: Backend, state: BackendState) -> str:
    wanted = backend.state.name.lower()
    name = f"[{backend.address},State:{wanted}]"
    return f"invalid state transition for backend[{name}] ({state.name.lower()}) -> ({wanted})"
