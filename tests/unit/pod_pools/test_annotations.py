"""The pool of a pod: its own annotations, then those of its namespace, else the default one."""

from __future__ import annotations

import anyio
import pytest

from cells.base.addresses import Family
from cells.cluster.pod_pools import AnnotatedPools
from cells.kubernetes.objects.core import Namespace, Pod
from cells.kubernetes.objects.kind import Meta
from cells.kubernetes.settings import ObjectSource
from cells.node.ipam.ranges import IpamError, IpamLaterError
from lifecycle import Table

pytestmark = pytest.mark.anyio
P = "ipam.cilium.io/"
V4, V6 = Family.IPV4, Family.IPV6


class Cluster:
    """Pods and namespaces."""

    def __init__(self, *, folder: bool = False) -> None:
        self.pods: Table[tuple[str, str], Pod] = Table("pods", key=lambda row: row.key)
        self.namespaces: Table[tuple[str, str], Namespace] = Table("namespaces", key=lambda row: row.key)
        self.first = [table.initializer("source") for table in (self.pods, self.namespaces)]
        source = ObjectSource.MANIFESTS if folder else ObjectSource.API_SERVER
        self.of = AnnotatedPools(source, self.pods, self.namespaces).pool_of

    def pod(self, name: str, **annotations: str) -> None:
        with self.pods.txn() as txn:
            txn.put(Pod(Meta(name=name, namespace="ns", annotations=_keys(annotations))))

    def namespace(self, **annotations: str) -> None:
        with self.namespaces.txn() as txn:
            txn.put(Namespace(Meta(name="ns", annotations=_keys(annotations))))


def _keys(annotations: dict[str, str]) -> dict[str, str]:
    return {P + name.replace("_", "-"): value for name, value in annotations.items()}


def test_the_pod_comes_before_its_namespace_and_a_family_before_both() -> None:
    there = Cluster()
    there.namespace(ip_pool="blue", ipv6_pool="blue6")
    there.pod("none")
    there.pod("red", ip_pool="red")
    there.pod("mixed", ip_pool="red", ipv6_pool="red6")
    assert [there.of("ns/none", family) for family in (V4, V6)] == ["blue", "blue6"]
    assert [there.of("ns/red", family) for family in (V4, V6)] == ["red", "red"]
    assert [there.of("ns/mixed", family) for family in (V4, V6)] == ["red", "red6"]


def test_owners_without_a_pool_annotation_get_the_default_pool() -> None:
    there = Cluster()
    there.namespace()
    there.pod("none")
    assert [there.of(owner, V4) for owner in ("router", "/", "NS/Pod", "ns/none")] == [""] * 4


def test_a_pod_that_must_have_a_pool_gets_none_of_the_default_one() -> None:
    there = Cluster()
    there.namespace(require_pool_match="true")
    there.pod("none")
    there.pod("red", ip_pool="red")
    there.pod("free", require_pool_match="false")
    assert (there.of("ns/red", V4), there.of("ns/free", V4)) == ("red", "")
    with pytest.raises(IpamError, match="require-pool-match") as refused:
        there.of("ns/none", V4)
    assert not isinstance(refused.value, IpamLaterError)


async def test_a_pod_that_is_not_known_yet_is_waited_for() -> None:
    there = Cluster()
    with pytest.raises(IpamLaterError, match='owner "ns/a": resource Pod "ns/a" not found') as later:
        there.of("ns/a", V4)
    there.pod("a")
    with anyio.fail_after(30):
        await later.value.wait()
    with pytest.raises(IpamLaterError, match='resource Namespace "ns" not found') as later:
        there.of("ns/a", V4)
    there.namespace(ip_pool="blue")
    with anyio.fail_after(30):
        await later.value.wait()
    assert there.of("ns/a", V4) == "blue"


def test_with_manifests_a_missing_pod_is_not_waited_for() -> None:
    there = Cluster(folder=True)
    there.namespace(ip_pool="blue")
    with pytest.raises(IpamLaterError):
        there.of("ns/a", V4)
    for each in there.first:
        each.done()
    assert there.of("ns/a", V4) == "blue"
