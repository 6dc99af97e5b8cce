"""Labels of endpoints: derived from requests and pods, and changed together with the identity.

Source: Cilium 1.17, PUT /endpoint, PATCH /endpoint/{id}/labels and pkg/labelsfilter.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import anyio
import msgspec
from msgspec.structs import replace

from cells.base.labels import RESERVED, Label, LabelFilter, parse, texts
from cells.cluster.identity.identities import Identities, Identity, NoIdentityError
from cells.cluster.identity.numbers import INIT_LABELS
from cells.endpoint import model
from cells.endpoint.kernel import Realization
from cells.endpoint.model import Endpoint, EndpointError, EndpointRequest, State
from cells.endpoint.registry import Registry


class EndpointLabels(msgspec.Struct, frozen=True):
    """An endpoint's labels by purpose, each sorted."""

    identity: tuple[str, ...]
    """Security-relevant labels."""
    info: tuple[str, ...] = ()
    custom: tuple[str, ...] = ()
    """Security-relevant labels that a user added (PATCH /endpoint/{id}/labels)."""


INIT = EndpointLabels(INIT_LABELS)
"""Labels of an endpoint without labels from a request or a pod."""


def request_labels(request: EndpointRequest, cluster: str, label_filter: LabelFilter) -> EndpointLabels:
    """Return the labels of an endpoint from its request alone, plus namespace and ``cluster`` of a pod.

    Raises EndpointError 400.
    """
    if not request.labels:
        return _namespace_labels(request.pod_namespace, cluster) if request.pod_namespace else INIT
    own = _labels_of_namespace(request.pod_namespace, cluster) if request.pod_namespace else []
    requested = _requested(request)
    identity, info = label_filter.split(requested.values())
    if not identity:
        raise EndpointError(400, "no valid labels provided")
    keys = {label.key for label in own}
    return EndpointLabels(texts([*(label for label in identity if label.key not in keys), *own]), texts(info))


@lru_cache(maxsize=1024)
def _namespace_labels(namespace: str, cluster: str) -> EndpointLabels:
    return EndpointLabels(texts(_labels_of_namespace(namespace, cluster)))


def _labels_of_namespace(namespace: str, cluster: str) -> list[Label]:
    """Return the labels that every pod of the namespace has."""
    return [
        Label("k8s", "io.kubernetes.pod.namespace", namespace),
        Label("k8s", "io.cilium.k8s.policy.cluster", cluster),
    ]


def merged_labels(
    request: EndpointRequest, pod: Iterable[Label], label_filter: LabelFilter
) -> EndpointLabels:
    """Return the labels of an endpoint from its pod, plus the request's labels with other keys.

    Raises EndpointError 400.
    """
    from_pod = {label.key: label for label in pod}
    identity, info = label_filter.split((_requested(request) | from_pod).values())
    return EndpointLabels(texts(identity) or INIT_LABELS, texts(info))


def with_pod_labels(endpoint: Endpoint, pod: Iterable[Label], label_filter: LabelFilter) -> EndpointLabels:
    """Return the labels of an endpoint after a change of its pod's labels.

    Custom labels stay, unless the pod has a label with the same key.
    """
    identity, info = label_filter.split(pod)
    keys = {label.key for label in identity}
    custom = [label for label in map(parse, endpoint.custom_labels) if label.key not in keys]
    return EndpointLabels(texts([*identity, *custom]) or INIT_LABELS, texts(info), texts(custom))


def with_custom_labels(
    endpoint: Endpoint, wanted: Iterable[str], label_filter: LabelFilter
) -> EndpointLabels:
    """Return the labels of an endpoint with ``wanted`` as its custom labels.

    Ignores labels with a key of the pod, and labels that the label filter excludes from identities. Raises
    EndpointError 500 if a reserved label would be added or removed.
    """
    before, after = set(map(parse, endpoint.custom_labels)), set(map(parse, wanted))
    reserved = texts(label for label in before ^ after if label.source == RESERVED)
    if reserved:
        raise EndpointError(500, f"Not allowed to add reserved labels: {','.join(reserved)}")
    own = [parse(text) for text in endpoint.pod_labels]
    keys = {label.key for label in own}
    custom: dict[str, Label] = {
        label.key: label
        for label in sorted(after)
        if label.key and label.key not in keys and label_filter.counts(label)
    }
    return EndpointLabels(texts([*own, *custom.values()]), endpoint.info_labels, texts(custom.values()))


def _requested(request: EndpointRequest) -> dict[str, Label]:
    requested = {label.key: label for label in map(parse, request.labels)}
    reserved = texts(label for label in requested.values() if label.source == RESERVED)
    if reserved:
        raise EndpointError(400, f"not allowed to add reserved labels: {','.join(reserved)}")
    return requested


# Changes labels and identity of a running endpoint without loss of traffic.
#
# Source: Cilium 1.17, change of an endpoint's identity.
#
# Policy maps of all peers have the new identity before the endpoint's packets carry it, and lose the old one
# afterwards: a flow that is allowed for both identities loses no packet.


class Relabel:
    """Changes labels and identity of an endpoint, in the table and in the kernel."""

    def __init__(self, registry: Registry, identities: Identities, realization: Realization) -> None:
        self._registry = registry
        self._identities = identities
        self._realization = realization

    async def run(self, endpoint_id: int, wanted: Callable[[Endpoint], EndpointLabels]) -> bool:
        """Set the ``wanted`` labels of an endpoint; return whether anything changed.

        Waits for the identity without a timeout and keeps the current one until then; calls ``wanted`` again
        if the endpoint changes meanwhile. The next regeneration writes the state file. Raises EndpointError
        500, with nothing changed, if no identity can be allocated or the kernel rejects the change.
        """
        before = self._registry.get(endpoint_id)
        if before is None or (
            labels_of(before) == wanted(before)
            and self._identities.is_current(before.identity, before.labels)
        ):
            return False
        resolving = self._registry.set_state(endpoint_id, State.WAITING_FOR_IDENTITY, model.RELABELLED)
        outcome = model.NOT_IDENTIFIED
        try:
            while (now := self._current(before)) is not None:
                labels = wanted(now)
                identity = await self._identities.acquire(labels.identity)
                await self._await_grace_period(identity)
                if self._apply_identity(before, identity, labels, wanted):
                    outcome = model.IDENTIFIED
                    return True
        except (NoIdentityError, OSError) as error:
            raise EndpointError(500, str(error)) from error
        finally:
            if resolving and self._current(before) is not None:
                self._registry.set_state(endpoint_id, State.READY, outcome)
        return False

    async def _await_grace_period(self, identity: Identity) -> None:
        """Wait for identity-change-grace-period; until then, other nodes may drop the identity's packets."""
        if (seconds := self._identities.grace(identity.id)) > 0:
            try:
                await anyio.sleep(seconds)
            except BaseException:
                self._identities.release(identity.id)
                raise

    def _apply_identity(
        self,
        requested: Endpoint,
        identity: Identity,
        labels: EndpointLabels,
        wanted: Callable[[Endpoint], EndpointLabels],
    ) -> bool:
        """Set labels and identity; False if the endpoint is deleted or ``wanted`` differs now.

        Raises OSError.
        """
        before = self._current(requested)
        if before is None or wanted(before) != labels:
            self._identities.release(identity.id)
            return False
        changed = replace(
            before,
            labels=labels.identity,
            info_labels=labels.info,
            custom_labels=labels.custom,
            identity=identity.id,
        )
        try:
            self._realization.update_identity(changed)
        except OSError:
            self._revert(before)
            self._identities.release(identity.id)
            raise
        self._registry.put(changed)
        self._identities.release(before.identity)
        return True

    def _revert(self, before: Endpoint) -> None:
        try:
            self._realization.update_identity(before)
        except OSError:  # the endpoint's next build and the maps' sweeps repair the entries
            return

    def _current(self, before: Endpoint) -> Endpoint | None:
        """Return the endpoint, or None if it is deleted; a later endpoint may have its id."""
        now = self._registry.get(before.id)
        return now if now is not None and now.created == before.created else None


def labels_of(endpoint: Endpoint) -> EndpointLabels:
    return EndpointLabels(endpoint.labels, endpoint.info_labels, endpoint.custom_labels)
