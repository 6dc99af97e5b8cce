"""The endpoints of this node: made, found, regenerated and removed here.

For:   CNI server, REST handlers, endpoint restore.   Needs: the edges of cells.endpoint.kernel.
Gives: Endpoints.
Source: Cilium 1.17, the endpoint manager: states, order of create and delete, lookups.

Everything is synchronous and on the event loop, so nobody ever sees half an endpoint.
"""

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from cells.endpoint.aftercare import Aftercare
from cells.endpoint.builds import Builds
from cells.endpoint.identity import INIT_LABELS, Identities, Identity, NoIdentityError
from cells.endpoint.kernel import EndpointAddresses, EndpointMaps, EndpointPrograms, PolicySlot
from cells.endpoint.labels import RESERVED, Label, parse, split_identity_labels, texts
from cells.endpoint.model import Endpoint, EndpointError, EndpointRequest
from cells.endpoint.policy import NodePolicy
from cells.endpoint.registry import Registry
from cells.endpoint.state_files import StateFiles
from cells.endpoint.states import Code, Level, State, StatusLog, Subject
from cells.ipam import IPAddress, IpamError
from cells.maps import PolicyIdsExhausted, PoolEmpty
from lifecycle import HiveError, Logger, Table

_REFUSALS = (OSError, HiveError, NoIdentityError, IpamError)


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
        maps: EndpointMaps,
        programs: EndpointPrograms,
        addresses: EndpointAddresses,
        files: StateFiles,
        aftercare: Aftercare,
        policy: NodePolicy,
        cluster_name: str,
        log: Logger,
    ) -> None:
        self.identities = identities
        self.builds = Builds()
        self._registry = Registry(table, log)
        self._maps = maps
        self._programs = programs
        self._addresses = addresses
        self._files = files
        self._aftercare = aftercare
        self._policy = policy
        self._cluster_label = Label("k8s", "io.cilium.k8s.policy.cluster", cluster_name)
        self._policies: dict[int, PolicySlot] = {}
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

    def create(self, request: EndpointRequest) -> Endpoint:
        """Make the endpoint of a link and an address that exist already; it comes back in state ready.

        Synchronous. The link is attached but not brought up: that is the caller's last step.
        Raises EndpointError 400 for a request that cannot be met and 500 for a kernel or disk that refuses,
        PoolEmpty when no policy map is prepared (await PolicyMaps.ready() and call again). Whatever is
        raised, nothing is left behind.
        """
        began = time.perf_counter()
        labels, info_labels = self._labels_of(request)
        self._registry.check_unused(request.attachment_id, request.addresses)
        with ExitStack() as undo:
            try:
                endpoint, policy = self._build(request, labels, info_labels, undo)
            except PoolEmpty:
                raise
            except PolicyIdsExhausted as error:
                raise EndpointError(500, "no more endpoint IDs available") from error
            except _REFUSALS as error:
                self.builds.count(began, worked=False)
                raise EndpointError(500, str(error)) from error
            undo.pop_all()
        self._policies[endpoint.id] = policy
        self.builds.count(began, worked=True)
        status = self._registry.add(endpoint)
        for state, message in _CREATION:
            status.add(Code.OK, Subject.OTHER, message, state, endpoint.created)
        return endpoint

    def _build(
        self, request: EndpointRequest, labels: tuple[str, ...], info_labels: tuple[str, ...], undo: ExitStack
    ) -> tuple[Endpoint, PolicySlot]:
        """Make all that an endpoint is in the kernel and on disk; each step's opposite goes to ``undo``."""
        maps = self._maps
        policy = maps.acquire_policy()
        undo.callback(self._quietly, "policy map", maps.release_policy, policy)
        identity = self.identities.acquire(labels)
        undo.callback(self.identities.release, identity.id)
        pool = "" if request.datapath.external_ipam else self._addresses.default_pool
        endpoint = _endpoint(request, policy.endpoint_id, identity, pool, self._policy)
        endpoint = replace(endpoint, info_labels=info_labels) if info_labels else endpoint

        maps.fill_policy(policy, self._policy.entries())
        undo.callback(self._quietly, "endpoint config", maps.drop_config, endpoint)
        maps.put_config(endpoint, any_source=self._any_source(endpoint))
        undo.callback(self._quietly, "cilium_lxc", maps.drop_lxc, endpoint)
        maps.put_lxc(endpoint)
        undo.callback(self._quietly, "cilium_ipcache", maps.drop_ipcache, endpoint)
        maps.put_ipcache(endpoint)
        self._programs.attach_endpoint(endpoint.ifindex, guarded=endpoint.datapath.guarded)
        undo.callback(self._quietly, "state directory", self._files.remove, endpoint.id)
        self._files.write(endpoint)
        if request.ipv6_expiration_uuid and request.ipv6 is not None:
            self._addresses.stop_expiration(request.ipv6, endpoint.ipv6_pool, request.ipv6_expiration_uuid)
        if request.expiration_uuid and request.ipv4 is not None:
            self._addresses.stop_expiration(request.ipv4, endpoint.pool, request.expiration_uuid)
        return endpoint, policy

    def _labels_of(self, request: EndpointRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Identity labels and informing labels of the endpoint to be; raises EndpointError 400."""
        if not request.labels:
            if not request.pod_namespace:
                return INIT_LABELS, ()
            return texts(self._labels_of_pod(request.pod_namespace)), ()
        given = {label.key: label for label in map(parse, request.labels)}
        reserved = texts(label for label in given.values() if label.source == RESERVED)
        if reserved:
            raise EndpointError(400, f"not allowed to add reserved labels: {','.join(reserved)}")
        identity, info = split_identity_labels(given.values())
        if not identity:
            raise EndpointError(400, "no valid labels provided")
        if request.pod_namespace:
            own = self._labels_of_pod(request.pod_namespace)
            identity = [*(label for label in identity if label.key not in {o.key for o in own}), *own]
        return texts(identity), texts(info)

    def _labels_of_pod(self, namespace: str) -> list[Label]:
        return [Label("k8s", "io.kubernetes.pod.namespace", namespace), self._cluster_label]

    # Change

    def relabel(self, endpoint_id: int, labels: tuple[str, ...], custom: tuple[str, ...]) -> None:
        """Give the endpoint these labels, ``custom`` of them a user's, and the identity they stand for.

        Whose packets they are is told at once, the rest follows with its next build. Raises EndpointError
        500, with nothing changed, when no identity is left, or the kernel refuses.
        """
        before = self._registry.get(endpoint_id)
        if before is None:
            return
        try:
            identity = self.identities.acquire(labels)
        except NoIdentityError as error:
            raise EndpointError(500, str(error)) from error
        changed = replace(before, labels=identity.labels, identity=identity.id, custom_labels=custom)
        try:
            self._maps.put_ipcache(changed)
        except OSError as error:
            self._quietly("cilium_ipcache", self._maps.put_ipcache, before)
            self.identities.release(identity.id)
            raise EndpointError(500, str(error)) from error
        resolving = self._registry.set_state(endpoint_id, State.WAITING_FOR_IDENTITY, _RELABELLED)
        self._registry.put(replace(changed, state=State.WAITING_FOR_IDENTITY if resolving else before.state))
        self.identities.release(before.identity)
        if resolving:
            self._registry.set_state(endpoint_id, State.READY, _IDENTIFIED)

    def verify_source(self, endpoint_id: int, verify: bool) -> None:
        """Have the endpoint send from its own addresses only, or from any; with its next build."""
        endpoint = self._registry.get(endpoint_id)
        if endpoint is not None:
            datapath = replace(endpoint.datapath, disable_sip_verification=not verify)
            self._registry.put(replace(endpoint, datapath=datapath))

    # Regenerate and restore

    def expose(self, restored: Iterable[tuple[Endpoint, PolicySlot]]) -> None:
        """Make endpoints of before a restart visible, in state restoring; none of them is touched yet."""
        for endpoint, policy in restored:
            self._policies[endpoint.id] = policy
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
            message = f"Successfully regenerated endpoint program (Reason: {reason})"
            status.add(Code.OK, Subject.BPF, message, State.REGENERATING)
            policy = self._policy
            registry.put(replace(endpoint, policy_revision=policy.revision, enforced=policy.enforced))
        self.builds.count(began, worked=not wrong)
        registry.set_state(endpoint_id, State.READY, _COMPLETED, builder=True)
        return wrong

    def reconcile_policy(self, endpoint_id: int) -> int:
        """Look at the whole policy map and put right what is wrong; how many entries were. Raises OSError."""
        policy = self._policies.get(endpoint_id)
        return 0 if policy is None else self._maps.reconcile_policy(policy, self._policy.entries())

    def _rewrite(self, endpoint: Endpoint) -> None:
        maps = self._maps
        self._write_policy(endpoint)
        maps.put_lxc(endpoint)
        maps.put_ipcache(endpoint)
        self._programs.attach_endpoint(endpoint.ifindex, guarded=endpoint.datapath.guarded)
        self._files.refresh(endpoint)

    def _write_policy(self, endpoint: Endpoint) -> None:
        self._maps.fill_policy(self._policies[endpoint.id], self._policy.entries())
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))

    def _any_source(self, endpoint: Endpoint) -> bool:
        return endpoint.datapath.disable_sip_verification or not self._policy.source_ip_verification

    # Delete

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Remove the endpoint from lookups, maps and disk; returns what went wrong, nothing if all went well.

        Every step is tried whatever happened before it. Deleting what is gone does nothing. The link is the
        caller's: without its rows, packets on it are dropped. ``release_address=False`` leaves the addresses
        to the caller too, who releases them once the link is gone; another IPAM's are never released.
        """
        current = self._registry.get(endpoint.id)
        if current is None or current.created != endpoint.created:
            return ()
        self._registry.remove(current)
        self._aftercare.gone(current.id)
        policy = self._policies.pop(current.id)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("cilium_lxc", partial(self._maps.drop_lxc, current)),
            ("cilium_ipcache", partial(self._maps.drop_ipcache, current)),
            ("endpoint config", partial(self._maps.drop_config, current)),
            ("policy map", partial(self._maps.release_policy, policy)),
            ("identity", partial(self.identities.release, current.identity)),
            ("state directory", partial(self._files.remove, current.id)),
        ]
        for address in current.addresses:
            steps.append(("conntrack", partial(self._aftercare.forget_flows, address)))
            if release_address and not current.datapath.external_ipam:
                pool = current.pool_of(address)
                steps.append(("address", partial(self._addresses.release, address, pool)))
        return tuple(error for what, do in steps if (error := self._quietly(what, do)))

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once the flows of removed endpoints with these addresses are forgotten.

        Until then another endpoint with the address would be taken for the old one. Mostly there is nothing
        to wait for; waits no longer than a few seconds.
        """
        await self._aftercare.forgotten(addresses)

    def _quietly(self, what: str, do: Callable[..., object], *args: object) -> str:
        """Take one step back; a failure is logged and returned as text, the next step still happens."""
        try:
            do(*args)
        except _REFUSALS as error:
            self._log.warning("endpoint left something behind", what=what, error=str(error))
            return f"{what}: {error}"
        return ""


def _endpoint(
    request: EndpointRequest, number: int, identity: Identity, default_pool: str, policy: NodePolicy
) -> Endpoint:
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
        identity=identity.id,
        labels=identity.labels,
        pod_name=request.pod_name,
        pod_namespace=request.pod_namespace,
        pod_uid=request.pod_uid,
        netns_cookie=request.netns_cookie,
        disable_legacy_identifiers=request.disable_legacy_identifiers,
        datapath=request.datapath,
        state=State.READY,
        created=time.time(),
        policy_revision=policy.revision,
        enforced=policy.enforced,
    )


def _triggered(reason: str) -> str:
    return f"Triggering endpoint regeneration due to {reason}"


_STARTING = "Starting endpoint regeneration"
_COMPLETED = "Completed endpoint regeneration with no pending regeneration requests"
_RELABELLED = "Triggering identity resolution due to updated identity labels"
_IDENTIFIED = "Set identity for this endpoint"
_INITIAL = "Initial build on endpoint creation"
_CREATION = (
    (State.WAITING_FOR_IDENTITY, "Endpoint creation"),
    (State.READY, _IDENTIFIED),
    (State.WAITING_TO_REGENERATE, _triggered(_INITIAL)),
    (State.REGENERATING, _STARTING),
    (State.REGENERATING, f"Successfully regenerated endpoint program (Reason: {_INITIAL})"),
    (State.READY, _COMPLETED),
)
