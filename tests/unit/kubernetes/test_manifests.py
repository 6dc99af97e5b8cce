"""A folder of manifests as a source of objects: each file in its last valid form."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from cells import kubernetes
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.manifest_parser import Folder, ManifestProblem, parse
from cells.kubernetes.manifests import ManifestFile
from cells.kubernetes.objects.core import PODS, SERVICES
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import KubernetesSettings
from lifecycle import HealthTree, Hive, Table
from lifecycle.testing import eventually
from tests.support.examples import scaled
from tests.unit.kubernetes.configured import node

pytestmark = pytest.mark.anyio

POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  labels: {{app: {app}}}
spec:
  nodeName: node-a
  containers:
  - name: c
    ports:
    - containerPort: 80
"""

SERVICE = """\
apiVersion: v1
kind: Service
metadata: {{name: a}}
spec:
  ports: [{{{port}}}]
"""
SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a}
addressType: IPv4
endpoints: null
ports: [{}, {port: 99999}]
"""


def test_documents_lists_and_json_are_all_read() -> None:
    text = (
        "---\n" + POD.format(name="a", app="web") + "---\n# nothing\n---\n" + POD.format(name="b", app="db")
    )
    assert [(one.kind, one.key) for one in parse(text.encode()).objects] == [
        (PODS, ("default", "a")),
        (PODS, ("default", "b")),
    ]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "x"}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [service, deployment]}
    assert [(one.kind, one.key) for one in parse(json.dumps(listed).encode()).objects] == [
        (SERVICES, ("x", "s"))
    ]
    typed = {"apiVersion": "v1", "kind": "ServiceList", "items": [{"metadata": {"name": "t"}}]}
    assert [one.key for one in parse(json.dumps(typed).encode()).objects] == [("default", "t")]


def test_a_node_has_no_namespace_and_times_stay_text() -> None:
    metadata = "{name: n, namespace: x, deletionTimestamp: 2025-01-15T10:00:00Z}"
    text = f"apiVersion: v1\nkind: Node\nmetadata: {metadata}\n"
    (node,) = parse(text.encode()).objects
    assert node.key == ("", "n")
    assert node.row.metadata.deletion_timestamp == "2025-01-15T10:00:00Z"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            POD.format(name="a", app="x").replace("containerPort: 80", "containerPort: eighty"),
            "11:22: Pod a: spec.containers[0].ports[0].containerPort: expected `int`, got `str`",
        ),
        ("a: [", "2:1: did not find expected node content"),
        ("a: b\n c: d", "2:3: mapping values are not allowed in this context"),
        ("just text", "1:1: expected an object with apiVersion and kind"),
        ("kind: Pod\n", "1:1: apiVersion is missing; expected an object with apiVersion and kind"),
        ("apiVersion: v1\n", "1:1: kind is missing; expected an object with apiVersion and kind"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {}\n", "3:11: metadata.name of the Pod is missing"),
        ("apiVersion: v1\nkind: Pod\nmetadata:\n", "3:10: metadata.name of the Pod is missing"),
        ("apiVersion: v1\nkind: Pod\nmetadata: [a]\n", "3:11: metadata of the Pod is not a mapping"),
        (
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: 5\n",
            '4:9: metadata.name of the Pod is a number, expected text; write "5"',
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: on}\n",
            '3:18: metadata.name of the Pod is a boolean, expected text; write "on"',
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: [a]}\n",
            "3:18: metadata.name of the Pod is a list, expected text",
        ),
        (
            POD.format(name="a", app="x").replace("containerPort: 80", "containerPort: 65536"),
            "11:22: Pod a: spec.containers[0].ports[0].containerPort: 65536; expected a port, 1 to 65535",
        ),
        (
            SERVICE.format(port="port: 0"),
            "5:18: Service a: spec.ports[0].port: 0; expected a port, 1 to 65535",
        ),
        (
            SERVICE.format(port="port: 80, targetPort: -1"),
            "5:34: Service a: spec.ports[0].targetPort: -1; expected a port, 1 to 65535",
        ),
        (
            SERVICE.format(port="port: 80, nodePort: 70000"),
            "5:32: Service a: spec.ports[0].nodePort: 70000; expected a port, 1 to 65535",
        ),
        (
            SLICE,
            "6:20: EndpointSlice a: ports[1].port: 99999; expected a port, 1 to 65535",
        ),
        (
            SERVICE.format(port="port: 80") + "  type: Node\n",
            "6:9: Service a: spec.type: 'Node'; expected ClusterIP, NodePort, LoadBalancer or ExternalName",
        ),
        (
            SERVICE.format(port="port: 80") + "  externalTrafficPolicy: local\n",
            "6:26: Service a: spec.externalTrafficPolicy: 'local'; expected Cluster or Local",
        ),
        (
            SERVICE.format(port="port: 80, protocol: tcp"),
            "5:32: Service a: spec.ports[0].protocol: 'tcp'; expected TCP, UDP or SCTP",
        ),
        (
            SLICE.replace("IPv4", "ipv4"),
            "4:14: EndpointSlice a: addressType: 'ipv4'; expected IPv4, IPv6 or FQDN",
        ),
        (
            SLICE.replace("addressType: IPv4\n", ""),
            "1:1: EndpointSlice a: addressType: ''; expected IPv4, IPv6 or FQDN",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n  name: b\n",
            "5:3: name is twice in one mapping",
        ),
        (
            POD.format(name="a", app="x") + "---\n" + POD.format(name="a", app="y"),
            "13:1: Pod default/a is defined in line 1 already",
        ),
    ],
)
def test_manifest_errors_have_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ManifestProblem) as raised:
        parse(text.encode())
    assert str(raised.value) == message


def test_a_recursive_yaml_value_is_reported() -> None:
    text = b"apiVersion: v1\nkind: Namespace\nmetadata: &m {name: a, labels: *m}\n"
    with pytest.raises(ManifestProblem, match="3:11: it contains itself, by an alias"):
        parse(text)


def test_the_same_value_may_stand_in_many_places() -> None:
    lists = b"".join(
        b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(20)
    )
    assert parse(b"apiVersion: v1\nkind: Other\na: &a [x]\n" + lists).objects == []


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=scaled(200), deadline=None)
def test_any_bytes_are_read_or_refused_in_one_line(text: bytes) -> None:
    message = ""
    with suppress(ManifestProblem):
        try:
            parse(text)
        except ManifestProblem as problem:
            message = str(problem)
            raise
    assert "\n" not in message


def test_a_broken_file_keeps_its_last_good_objects(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web"))
    (tmp_path / "b.yaml").write_text(POD.format(name="b", app="web"))
    folder = Folder(tmp_path)
    assert folder.read()
    (tmp_path / "a.yaml").write_text("kind: [")
    assert folder.read()
    assert set(folder.objects()["pods"]) == {("default", "a"), ("default", "b")}
    assert folder.files()[0].error.startswith(f"{tmp_path}/a.yaml:2:1: ")
    assert folder.complete
    assert not folder.read()
    (tmp_path / "a.yaml").unlink()
    assert folder.read({"a.yaml"})
    assert set(folder.objects()["pods"]) == {("default", "b")}


def test_of_an_object_in_two_files_the_first_counts(tmp_path: Path) -> None:
    (tmp_path / "1.yaml").write_text(POD.format(name="a", app="first"))
    (tmp_path / "2.yaml").write_text(POD.format(name="a", app="second"))
    folder = Folder(tmp_path)
    folder.read()
    assert folder.objects()["pods"]["default", "a"].labels == {"app": "first"}
    assert (
        folder.files()[1].error
        == f"{tmp_path}/2.yaml:1:1: Pod default/a is defined in 1.yaml already, which is used"
    )


@pytest.mark.parametrize(
    ("api_version", "kind", "message"),
    [
        ("apps/v1", "Deployment", ""),
        ("v1", "ConfigMap", ""),
        ("rbac.authorization.k8s.io/v1", "ClusterRole", ""),
        ("gateway.networking.k8s.io/v1", "Gateway", ""),
        ("v1", "Servcie", "Servcie is not known; is it Service?"),
        ("apps/v1", "Deploymnet", "Deploymnet is not known; is it Deployment?"),
        (
            "cilium.io/v2",
            "CiliumNetworkPolicies",
            "CiliumNetworkPolicies is not known; is it CiliumNetworkPolicy?",
        ),
        ("cilium.io/v1", "CiliumNetworkPolicy", "CiliumNetworkPolicy is read as cilium.io/v2 only"),
        ("discovery.k8s.io/v1beta1", "EndpointSlice", "EndpointSlice is read as discovery.k8s.io/v1 only"),
        ("cilium.io/v2alpha1", "CiliumBGPPeeringPolicy", "CiliumBGPPeeringPolicy is not served"),
        ("cert-manager.io/v1", "Certificate", "Certificate is not known"),
    ],
)
def test_skipped_documents_are_reported_where_they_may_be_a_mistake(
    tmp_path: Path, api_version: str, kind: str, message: str
) -> None:
    other = f"---\napiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: x}}\n"
    (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web") + other)
    folder = Folder(tmp_path)
    folder.read()
    (one,) = folder.files()
    assert (one.objects, one.error) == (1, "")
    assert one.left_out == (f"{tmp_path}/a.yaml:13:1: {message}" if message else "")
    assert one.others == (() if message else (kind,))


async def test_skipped_documents_are_in_health_and_logged_once(tmp_path: Path) -> None:
    other = "---\napiVersion: v1\nkind: Pods\n"
    (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web") + 2 * other)
    with structlog.testing.capture_logs() as logs:
        async with agent(tmp_path) as hive:
            (tmp_path / "b.yaml").write_text(POD.format(name="b", app="web"))
            await eventually(lambda: pod_names(hive) == {"a", "b"})
            (ok,) = (
                one.message
                for one in hive.get(HealthTree).snapshot()
                if one.module.endswith(".manifests") and one.level == "ok"
            )
    left_out = f"{tmp_path}/a.yaml:13:1: Pods is not known; is it Pod? (and 1 more)"
    assert ok == f"2 objects of 2 files; left out: {left_out}"
    assert [one["left_out"] for one in logs if "left_out" in one] == [left_out]


def test_hidden_files_and_others_are_not_read(tmp_path: Path) -> None:
    for name in (".a.yaml", "a.yaml~", "a.txt", ".a.yaml.swp"):
        (tmp_path / name).write_text("kind: [")
    (tmp_path / "sub.yaml").mkdir()
    folder = Folder(tmp_path)
    folder.read()
    assert folder.files() == []


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[Hive]:
    async with Hive(node(), kubernetes.cell, settings={"manifests-dir": str(folder)}).started() as hive:
        yield hive


def pod_names(hive: Hive) -> set[str]:
    return {row.name for row in hive.get(Resources).table(PODS).all()}


async def test_the_tables_follow_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text(POD.format(name="a", app="web"))
    async with agent(folder) as hive:
        table = hive.get(Resources).table(PODS)
        assert table.initialized
        assert pod_names(hive) == {"a"}
        (folder / "b.yaml").write_text(POD.format(name="b", app="web"))
        await eventually(lambda: pod_names(hive) == {"a", "b"})
        fresh = folder / ".b.tmp"
        fresh.write_text(POD.format(name="c", app="web"))
        fresh.replace(folder / "b.yaml")
        await eventually(lambda: pod_names(hive) == {"a", "c"})
        (folder / "a.yaml").unlink()
        await eventually(lambda: pod_names(hive) == {"c"})


async def test_a_manifest_counts_when_it_is_written_not_while(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(POD.format(name="a", app="web"))
    async with agent(tmp_path) as hive:
        with path.open("w") as file:  # empty from now on
            (tmp_path / "b.yaml").write_text(POD.format(name="b", app="web"))
            await eventually(lambda: "b" in pod_names(hive))
            assert pod_names(hive) == {"a", "b"}
            file.write(POD.format(name="c", app="web"))
        await eventually(lambda: pod_names(hive) == {"b", "c"})


async def test_a_folder_that_is_emptied_takes_nothing_away_until_it_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.kubernetes.manifests.FILLED", 0.3)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.yaml").write_text(POD.format(name=name, app="web"))
    async with agent(tmp_path) as hive:
        for name in ("a", "b", "c"):
            (tmp_path / f"{name}.yaml").unlink()

        def degraded() -> list[str]:
            return [one.message for one in hive.get(HealthTree).snapshot() if one.level == "degraded"]

        await eventually(lambda: any("is empty" in one for one in degraded()))
        assert pod_names(hive) == {"a", "b", "c"}
        (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web"))
        (tmp_path / "b.yaml").write_text(POD.format(name="d", app="web"))
        await eventually(lambda: "d" in pod_names(hive))
        await eventually(lambda: pod_names(hive) == {"a", "d"})
        await eventually(lambda: not degraded())
        (tmp_path / "a.yaml").unlink()
        await eventually(lambda: pod_names(hive) == {"d"})
        (tmp_path / "b.yaml").write_text("")  # explicitly: there is nothing
        await eventually(lambda: pod_names(hive) == set())


async def test_a_broken_manifest_degrades_health_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web"))
    async with agent(tmp_path) as hive:
        (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web").replace("80", "eighty"))
        files = hive.get(Table[str, ManifestFile])
        await eventually(lambda: (one := files.get("a.yaml")) is not None and bool(one.error))
        assert pod_names(hive) == {"a"}
        degraded = [one for one in hive.get(HealthTree).snapshot() if one.level == "degraded"]
        assert [one.module.rpartition(".")[2] for one in degraded] == ["manifests"]
        assert f"{tmp_path}/a.yaml:11:22: Pod a:" in degraded[0].message
        (tmp_path / "a.yaml").write_text(POD.format(name="a2", app="web"))
        await eventually(lambda: pod_names(hive) == {"a2"})
        await eventually(
            lambda: not [one for one in hive.get(HealthTree).snapshot() if one.level == "degraded"]
        )


async def test_a_manifest_broken_from_the_start_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: [")
    (tmp_path / "b.yaml").write_text(POD.format(name="b", app="web"))
    async with agent(tmp_path) as hive:
        table = hive.get(Resources).table(PODS)
        assert pod_names(hive) == {"b"}
        assert not table.initialized
        (tmp_path / "a.yaml").write_text(POD.format(name="a", app="web"))
        await table.wait_initialized()
        assert pod_names(hive) == {"a", "b"}


async def test_a_mounted_config_map_is_swapped_as_a_whole(tmp_path: Path) -> None:
    def generation(number: int, *names: str) -> None:
        fresh = tmp_path / f"..data_{number}"
        fresh.mkdir()
        for name in names:
            (fresh / "pods.yaml").write_text(POD.format(name=name, app="web"))
        (tmp_path / "..data_tmp").symlink_to(fresh.name)
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")  # noqa: PTH105  # a link over a link

    generation(1, "one")
    (tmp_path / "pods.yaml").symlink_to("..data/pods.yaml")
    async with agent(tmp_path) as hive:
        assert pod_names(hive) == {"one"}
        generation(2, "two")
        await eventually(lambda: pod_names(hive) == {"two"})


async def test_without_a_source_the_tables_are_empty_and_initialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with Hive(node(), kubernetes.cell).started() as hive:
        resources = hive.get(Resources)
        assert all(resources.table(kind).initialized for kind in resources.kinds)
        assert not hive.get(KubernetesAPI).enabled
        assert not [one for one in hive.get(HealthTree).snapshot() if one.level == "degraded"]


def test_two_sources_are_refused() -> None:
    both = KubernetesSettings(manifests_dir="/x", k8s_api_server="https://a")
    with pytest.raises(ValueError, match="objects come from one place"):
        both.validate()
