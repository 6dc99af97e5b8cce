"""The labels of an endpoint, from the requester and from its pod's objects, and their change while it lives.

Source: Cilium 1.17, PUT /endpoint and the labels of pods.
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
    """Labels by what they are for, each sorted."""

    identity: tuple[str, ...]
    info: tuple[str, ...] = ()
    custom: tuple[str, ...] = ()
    """Those for the identity that a user put on the endpoint."""


INIT = EndpointLabels(INIT_LABELS)
"""Of an endpoint of which nothing is known."""


def called_labels(request: EndpointRequest, cluster: str, keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint by its request alone; the name of the ``cluster`` is on every pod.

    Raises EndpointError 400.
    """
    if not request.labels:
        return _namespace_labels(request.pod_namespace, cluster) if request.pod_namespace else INIT
    own = _of_namespace(request.pod_namespace, cluster) if request.pod_namespace else []
    given = _given(request)
    identity, info = keep.split(given.values())
    if not identity:
        raise EndpointError(400, "no valid labels provided")
    keys = {label.key for label in own}
    return EndpointLabels(texts([*(label for label in identity if label.key not in keys), *own]), texts(info))


@lru_cache(maxsize=1024)
def _namespace_labels(namespace: str, cluster: str) -> EndpointLabels:
    return EndpointLabels(texts(_of_namespace(namespace, cluster)))


def _of_namespace(namespace: str, cluster: str) -> list[Label]:
    """What every pod of the namespace has."""
    return [
        Label("k8s", "io.kubernetes.pod.namespace", namespace),
        Label("k8s", "io.cilium.k8s.policy.cluster", cluster),
    ]


def merged_labels(request: EndpointRequest, pod: Iterable[Label], keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint by its pod; the request's are added where the pod has no such key.

    Raises EndpointError 400.
    """
    known = {label.key: label for label in pod}
    identity, info = keep.split((_given(request) | known).values())
    return EndpointLabels(texts(identity) or INIT_LABELS, texts(info))


def of_pod(endpoint: Endpoint, pod: Iterable[Label], keep: LabelFilter) -> EndpointLabels:
    """The labels of an existing endpoint of a pod with these; a user's stay unless the pod has the key."""
    identity, info = keep.split(pod)
    keys = {label.key for label in identity}
    custom = [label for label in map(parse, endpoint.custom_labels) if label.key not in keys]
    return EndpointLabels(texts([*identity, *custom]) or INIT_LABELS, texts(info), texts(custom))


def with_custom(endpoint: Endpoint, wanted: Iterable[str], keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint there is, once a user wants these on it.

    A label with a key that the pod has already changes nothing, nor does one that makes no identity. Raises
    EndpointError 500 for reserved ones that are added or taken away.
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
        if label.key and label.key not in keys and keep.counts(label)
    }
    return EndpointLabels(texts([*own, *custom.values()]), endpoint.info_labels, texts(custom.values()))


def _given(request: EndpointRequest) -> dict[str, Label]:
    given = {label.key: label for label in map(parse, request.labels)}
    reserved = texts(label for label in given.values() if label.source == RESERVED)
    if reserved:
        raise EndpointError(400, f"not allowed to add reserved labels: {','.join(reserved)}")
    return given


# Gives an endpoint that lives other labels, and the identity they stand for, without a gap in its traffic.
#
# Source: Cilium 1.17, change of an endpoint's identity.
#
# The new identity is in the policy maps of every peer before the endpoint's packets carry it, and the old one
# leaves them after: a flow that both allow loses no packet.


class Relabel:
    """Changes labels, and has the kernel follow."""

    def __init__(self, registry: Registry, identities: Identities, realization: Realization) -> None:
        self._registry = registry
        self._identities = identities
        self._realization = realization

    async def run(self, endpoint_id: int, wanted: Callable[[Endpoint], EndpointLabels]) -> bool:
        """Give the endpoint its ``wanted`` labels; whether anything changed.

        It waits for the identity as long as it takes, and goes on with the one it has until then; what
        changes meanwhile is taken into account. The state file follows with the next build. Raises
        EndpointError 500, with nothing changed, when no identity is left, or the kernel refuses.
        """
        asked = self._registry.get(endpoint_id)
        if asked is None or (
            labels_of(asked) == wanted(asked) and self._identities.stands_for(asked.identity, asked.labels)
        ):
            return False
        resolving = self._registry.set_state(endpoint_id, State.WAITING_FOR_IDENTITY, model.RELABELLED)
        outcome = model.NOT_IDENTIFIED
        try:
            while (now := self._still(asked)) is not None:
                labels = wanted(now)
                identity = await self._identities.acquire(labels.identity)
                await self._let_others_know(identity)
                if self._applied(asked, identity, labels, wanted):
                    outcome = model.IDENTIFIED
                    return True
        except (NoIdentityError, OSError) as error:
            raise EndpointError(500, str(error)) from error
        finally:
            if resolving and self._still(asked) is not None:
                self._registry.set_state(endpoint_id, State.READY, outcome)
        return False

    async def _let_others_know(self, identity: Identity) -> None:
        """Wait while other nodes may not know it yet: they cannot be asked, and would drop its packets."""
        if (seconds := self._identities.grace(identity.id)) > 0:
            try:
                await anyio.sleep(seconds)
            except BaseException:
                self._identities.release(identity.id)
                raise

    def _applied(
        self,
        asked: Endpoint,
        identity: Identity,
        labels: EndpointLabels,
        wanted: Callable[[Endpoint], EndpointLabels],
    ) -> bool:
        """Set its identity, unless it is deleted or other labels are wanted now; raises OSError."""
        before = self._still(asked)
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
            self._realization.carry(changed)
        except OSError:
            self._back(before)
            self._identities.release(identity.id)
            raise
        self._registry.put(changed)
        self._identities.release(before.identity)
        return True

    def _back(self, before: Endpoint) -> None:
        try:
            self._realization.carry(before)
        except OSError:  # what is wrong now is put right by the endpoint's next build and the maps' sweeps
            return

    def _still(self, asked: Endpoint) -> Endpoint | None:
        """The endpoint, unless it is deleted; another one may have its number."""
        now = self._registry.get(asked.id)
        return now if now is not None and now.created == asked.created else None


def labels_of(endpoint: Endpoint) -> EndpointLabels:
    """The labels it has."""
    return EndpointLabels(endpoint.labels, endpoint.info_labels, endpoint.custom_labels)
