"""The pool of a pod's addresses, from annotations of the pod and its namespace.

Source: Pods and Namespaces in, a pool out; used in IPAM mode multi-pool only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Final

from cells.base.addresses import Family
from cells.kubernetes.objects.core import Namespace, Pod
from cells.kubernetes.settings import ObjectSource
from cells.node.ipam.pools import PodPools
from cells.node.ipam.ranges import IpamError, IpamLaterError
from lifecycle import Table, module, provide

__all__ = ["AnnotatedPools", "cell"]


# The pool that a pod or its namespace is annotated with.

PREFIX: Final = "ipam.cilium.io/"
BOTH: Final = PREFIX + "ip-pool"
OF: Final = {Family.IPV4: PREFIX + "ipv4-pool", Family.IPV6: PREFIX + "ipv6-pool"}
REQUIRED: Final = PREFIX + "require-pool-match"
""""true": the pod gets no address of the default pool; on the pod, otherwise on its namespace."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
REFUSED: Final = 502


class AnnotatedPools:
    """Pools by annotations."""

    def __init__(
        self,
        source: ObjectSource,
        pods: Table[tuple[str, str], Pod],
        namespaces: Table[tuple[str, str], Namespace],
    ) -> None:
        self._folder = source is ObjectSource.MANIFESTS
        self._pods = pods
        self._namespaces = namespaces

    def pool_of(self, owner: str, family: Family) -> str:
        """The pool of ``namespace/pod``; empty for the default one, and for owners that are not pods.

        Raises IpamLaterError while the pod or its namespace is not known, IpamError if it requires a pool and
        has none.
        """
        namespace, slash, name = owner.partition("/")
        if not (slash and _NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
            return ""
        pod, space = self._pods.get((namespace, name)), self._namespaces.get(("", namespace))
        if pod is None and not (self._folder and self._pods.initialized):
            wait = partial(self._pods.wait_for, (namespace, name))
            raise IpamLaterError(_unknown(owner, "Pod", owner), wait)
        if space is None and not (self._folder and self._namespaces.initialized):
            raise IpamLaterError(
                _unknown(owner, "Namespace", namespace), partial(self._namespaces.wait_for, ("", namespace))
            )
        annotations = [one.annotations for one in (pod, space) if one is not None]
        if found := next(filter(None, (_pool(each, family) for each in annotations)), ""):
            return found
        if next((each[REQUIRED] for each in annotations if REQUIRED in each), "") == "true":
            raise IpamError(
                REFUSED,
                f'no IPAM pool for owner "{owner}": {REQUIRED} is "true", and neither the pod nor its'
                f" namespace is annotated with {OF[family]} or {BOTH}",
            )
        return ""


def _pool(annotations: Mapping[str, str], family: Family) -> str:
    return annotations.get(OF[family], "") or annotations.get(BOTH, "")


def _unknown(owner: str, kind: str, name: str) -> str:
    return f'unable to determine IPAM pool for owner "{owner}": resource {kind} "{name}" not found'


cell = module("pod-pools", "Pools that pods choose", provide(AnnotatedPools, as_=(PodPools,)))
