"""hive build-config: sources, their precedence, and the directory it writes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio import to_thread
from click.testing import CliRunner, Result

from cells.kubernetes.settings import KubernetesSettings
from hive.config.build_config import write
from hive.config.build_config.api_server import ApiServer as Asked
from hive.config.build_config.cluster import ClusterError, NodeConfig
from hive.config.build_config.sources import Source, read_directory
from hive.main import cli
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer, Fault, on
from tests.unit.kubernetes.cluster import kubeconfig

MANIFESTS = """
apiVersion: v1
kind: ConfigMap
metadata: {name: cilium-config, namespace: kube-system}
data: {debug: "false", mtu: "1400"}
---
apiVersion: v1
kind: Node
metadata:
  name: n1
  labels: {role: edge, config.cilium.io/mtu: "1300", config.cilium.io/debug: "false"}
  annotations: {config.cilium.io/debug: "true"}
---
apiVersion: cilium.io/v2
kind: CiliumNodeConfig
metadata: {name: b, namespace: kube-system}
spec:
  nodeSelector: {matchLabels: {role: edge}}
  defaults: {debug: "false"}
---
apiVersion: cilium.io/v2
kind: CiliumNodeConfig
metadata: {name: a, namespace: kube-system}
spec:
  nodeSelector: {matchExpressions: [{key: role, operator: Exists}]}
  defaults: {debug: "true", mtu: "9000"}
---
apiVersion: cilium.io/v2
kind: CiliumNodeConfig
metadata: {name: nobody, namespace: kube-system}
spec:
  defaults: {debug: "never taken"}
"""


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    directory = tmp_path / "manifests"
    directory.mkdir()
    (directory / "objects.yaml").write_text(MANIFESTS)
    return directory


def build(dest: Path, *arguments: str, node: str = "n1") -> Result:
    env = {"K8S_NODE_NAME": node, "CILIUM_K8S_NAMESPACE": "kube-system"}
    return CliRunner().invoke(cli, ["build-config", f"--dest={dest}", *arguments], env=env)


def settings(dest: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in dest.iterdir() if not path.name.startswith("..")}


def test_later_sources_win_and_matching_node_configs_by_name(manifests: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    result = build(dest, f"--manifests-dir={manifests}")
    assert result.exit_code == 0, result.output
    found = settings(dest)
    assert (found["debug"], found["mtu"]) == ("false", "9000")
    assert json.loads(found["config-sources"]) == [
        {"kind": "config-map", "namespace": "kube-system", "name": "cilium-config"},
        {"kind": "cilium-node-config", "namespace": "kube-system", "name": "a"},
        {"kind": "cilium-node-config", "namespace": "kube-system", "name": "b"},
    ]
    assert found["config-sources-overrides"] == '{"allowConfigKeys":null,"denyConfigKeys":null}'
    assert "cilium-node-config:kube-system/b overrides debug" in result.stderr


def test_a_node_overrides_by_annotation_over_label(manifests: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    build(dest, f"--manifests-dir={manifests}", "--source=config-map:cilium-config,node:")
    assert (settings(dest)["debug"], settings(dest)["mtu"]) == ("true", "1300")


def test_without_the_node_source_its_annotations_mean_nothing(manifests: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    build(dest, f"--manifests-dir={manifests}", "--source=config-map:cilium-config")
    assert settings(dest)["debug"] == "false"


@pytest.mark.parametrize(
    ("option", "mtu", "debug"),
    [
        ("--allow-config-keys=debug", "1400", "true"),
        ("--deny-config-keys=debug", "1300", "false"),
    ],
)
def test_protected_keys_of_later_sources_are_ignored(
    manifests: Path, tmp_path: Path, option: str, mtu: str, debug: str
) -> None:
    dest = tmp_path / "out"
    result = build(dest, f"--manifests-dir={manifests}", "--source=config-map,node", option)
    assert (settings(dest)["mtu"], settings(dest)["debug"]) == (mtu, debug)
    assert "has the non-overridable key" in result.stderr


def test_an_empty_list_of_keys_restricts_nothing(manifests: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    empty = ("--allow-config-keys=", "--deny-config-keys=debug")
    build(dest, f"--manifests-dir={manifests}", "--source=config-map,node", *empty)
    assert (settings(dest)["mtu"], settings(dest)["debug"]) == ("1300", "false")
    build(dest, f"--manifests-dir={manifests}", "--source=config-map,node", empty[0])
    assert (settings(dest)["mtu"], settings(dest)["debug"]) == ("1300", "true")


def test_keys_that_a_config_map_cannot_have_are_left_out(tmp_path: Path) -> None:
    long = "k" * 254
    labels = {"config.cilium.io/a b": "1", f"config.cilium.io/{long}": "2", "config.cilium.io/mtu": "1400"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "annotations": labels}}
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    result = build(tmp_path / "out", f"--manifests-dir={tmp_path}", "--source=node")
    assert settings(tmp_path / "out").keys() == {"mtu", "config-sources", "config-sources-overrides"}
    assert f"error: {long!r} is not a key of a ConfigMap: left out" in result.stderr


def test_a_missing_node_fails(manifests: Path, tmp_path: Path) -> None:
    result = build(tmp_path / "out", f"--manifests-dir={manifests}", "--source=config-map,node:other")
    assert result.exit_code == 1
    assert "Build config failed: node:other not found" in result.output
    assert not (tmp_path / "out").exists()


def test_a_named_node_config_is_taken_whatever_it_selects(manifests: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    build(dest, f"--manifests-dir={manifests}", "--source=cilium-node-config:kube-system/nobody")
    assert settings(dest)["debug"] == "never taken"


def test_a_missing_config_map_counts_as_empty_and_is_logged(manifests: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    result = build(dest, f"--manifests-dir={manifests}", "--source=config-map:other,node:n1")
    assert result.exit_code == 0
    assert "error: config-map:kube-system/other not found: taken as empty" in result.stderr
    assert settings(dest)["mtu"] == "1300"


def test_a_mounted_config_map_is_a_source(tmp_path: Path) -> None:
    mounted, dest = tmp_path / "mounted", tmp_path / "out"
    write.write_directory(mounted, {"debug": "true"}, print)
    assert build(dest, f"--source=directory:{mounted}").exit_code == 0
    assert settings(dest)["debug"] == "true"
    assert json.loads(settings(dest)["config-sources"])[0]["name"] == str(mounted)


def test_the_directory_changes_at_once_and_forgets(tmp_path: Path) -> None:
    messages: list[str] = []
    write.write_directory(tmp_path, {"a": "1", "b": "2", "x/y": "3"}, messages.append)
    assert messages == ["error: 'x/y' is not a key of a ConfigMap: left out"]
    assert (tmp_path / "a").readlink() == Path("..data/a")
    first = (tmp_path / "..data").readlink()
    write.write_directory(tmp_path, {"a": "9"}, messages.append)
    assert settings(tmp_path) == {"a": "9"}
    assert (tmp_path / "..data").readlink() != first
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("..data_")) == [
        str((tmp_path / "..data").readlink())
    ]


def test_a_failed_write_leaves_the_previous_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write.write_directory(tmp_path, {"a": "1"}, print)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write.write_directory(tmp_path, {"a": "2"}, print)
    assert settings(tmp_path) == {"a": "1"}
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("..data_")]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--source=secret:x"], 2, "unknown config source 'secret:x'"),
        (["--source=config-map"], 2, "expected a namespace, as config-map:NAMESPACE/NAME"),
        (["--source=node"], 2, "expected the node after a colon"),
        (["--source=config-map:a/b"], 1, "no API server: set --k8s-kubeconfig-path"),
        (["--source=config-map:a/b", "--k8s-api-server=x://y"], 1, "k8s-api-server=x://y: expected a URL"),
        (["--source=directory"], 2, "expected the directory after a colon"),
        (["--source=directory:/none"], 1, "Build config failed: directory:/none: expected a directory"),
        (["--manifests-dir=/none"], 1, "Build config failed: /none: expected a directory of manifests"),
        (["--dest="], 2, "--dest is required"),
    ],
)
def test_a_configuration_error_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    from hive.main import main

    with pytest.raises(SystemExit) as ended:
        main(["build-config", f"--dest={tmp_path / 'out'}", *arguments])
    assert ended.value.code == code
    stderr = capsys.readouterr().err
    assert text in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "kind: ConfigMap\nmetadata: {name: cilium-config, namespace: kube-system}\ndata: {mtu: 1400}",
        "kind: [",
        "just a text",
    ],
)
def test_invalid_manifests_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    result = build(tmp_path / "out", f"--manifests-dir={tmp_path}")
    assert result.exit_code == 1
    assert "bad.yaml" in result.output
    assert not (tmp_path / "out").exists()


def test_a_mounted_config_map_is_read_as_one_generation(tmp_path: Path) -> None:
    for generation in ("..1", "..2"):
        (tmp_path / generation).mkdir()
        (tmp_path / generation / "first").write_text(generation)
    (tmp_path / "..2" / "new").write_text("..2")
    (tmp_path / "..data").symlink_to("..2")
    for key in ("first", "old"):  # the kubelet has swapped, and has yet to tend the keys' own links
        (tmp_path / key).symlink_to(f"..data/{key}")
    assert read_directory(str(tmp_path)) == {"first": "..2", "new": "..2"}
    (tmp_path / "..data").unlink()
    (tmp_path / "..data").symlink_to("..1")
    assert read_directory(str(tmp_path)) == {"first": "..1"}


# ---- of an API server


def definition(*versions: str) -> dict[str, Any]:
    """Of CiliumNodeConfig, in these versions."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"plural": "ciliumnodeconfigs", "singular": "ciliumnodeconfig", "kind": "CiliumNodeConfig"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "ciliumnodeconfigs.cilium.io"},
        "spec": {
            "group": "cilium.io",
            "scope": "Namespaced",
            "names": {**names, "listKind": "CiliumNodeConfigList"},
            "versions": [
                {"name": one, "served": True, "storage": one == versions[0], "schema": schema}
                for one in versions
            ],
        },
    }


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    one.crd_delay = 0
    async with one.serving():
        yield one


async def filled(server: ApiServer, version: str = "v2") -> None:
    """With the manifests of the other tests."""
    server.add(definition(version))
    await eventually(lambda: server.kinds.get("cilium.io", version, "ciliumnodeconfigs") is not None)
    server.definitions.fresh.clear()
    for body in yaml.safe_load_all(MANIFESTS.replace("cilium.io/v2", f"cilium.io/{version}")):
        server.add(body)


async def asked(server: ApiServer, folder: Path, *arguments: str) -> Result:
    """Of the fake API server, by its kubeconfig."""
    path = kubeconfig(folder, f"http://127.0.0.1:{server.port}")
    given = (f"--k8s-kubeconfig-path={path}", *arguments)
    return await to_thread.run_sync(lambda: build(folder / "out", *given))


@pytest.mark.anyio
@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
async def test_the_api_server_is_asked_as_the_manifests_are(
    server: ApiServer, tmp_path: Path, version: str
) -> None:
    await filled(server, version)
    result = await asked(server, tmp_path, "--source=config-map,cilium-node-config,node")
    assert result.exit_code == 0, result.output
    found = settings(tmp_path / "out")
    assert (found["debug"], found["mtu"]) == ("true", "1300")
    assert [one["kind"] for one in json.loads(found["config-sources"])] == [
        "config-map",
        "cilium-node-config",
        "cilium-node-config",
        "node",
    ]


@pytest.mark.anyio
async def test_without_the_ciliumnodeconfig_crd_there_are_no_node_configs(
    server: ApiServer, tmp_path: Path
) -> None:
    data = {"metadata": {"name": "cilium-config", "namespace": "kube-system"}, "data": {"mtu": "1400"}}
    server.add({"apiVersion": "v1", "kind": "ConfigMap", **data})
    result = await asked(server, tmp_path)
    assert result.exit_code == 0, result.output
    assert settings(tmp_path / "out")["mtu"] == "1400"


@pytest.mark.anyio
async def test_a_refusing_api_server_leaves_the_previous_values(server: ApiServer, tmp_path: Path) -> None:
    await filled(server)
    assert (await asked(server, tmp_path)).exit_code == 0
    server.faults.add(Fault(on("/apis/cilium.io/"), times=-1, status=403))
    result = await asked(server, tmp_path)
    assert result.exit_code == 1
    assert "Build config failed: 403 Forbidden" in result.output
    assert settings(tmp_path / "out")["mtu"] == "9000"


def cluster(server: ApiServer, folder: Path, messages: list[str], patience: float = 60.0) -> Asked:
    """What build-config looks its sources up in."""
    path = kubeconfig(folder, f"http://127.0.0.1:{server.port}")
    source = Source("cilium-node-config", "kube-system", "")
    return Asked(
        KubernetesSettings(k8s_kubeconfig_path=path), [source], "n1", messages.append, patience=patience
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    "fault", [Fault(times=-1, close=True), Fault(times=-1, status=503)], ids=["connection closed", "503"]
)
async def test_a_server_that_is_away_is_waited_for(server: ApiServer, tmp_path: Path, fault: Fault) -> None:
    await filled(server)
    server.faults.add(fault)
    messages: list[str] = []
    async with anyio.create_task_group() as group:
        found: list[NodeConfig] = []

        async def ask() -> None:
            asked = cluster(server, tmp_path, messages)
            found.extend(await to_thread.run_sync(asked.node_configs, "kube-system"))

        group.start_soon(ask)
        await eventually(lambda: bool(messages))
        server.faults.clear()
    assert [one.name for one in found] == ["a", "b", "nobody"]
    assert "no API server answers yet, asking again for" in messages[0]


@pytest.mark.anyio
async def test_a_server_that_stays_away_fails(server: ApiServer, tmp_path: Path) -> None:
    server.faults.add(Fault(times=-1, close=True))
    asked = cluster(server, tmp_path, [], patience=0.0)
    with pytest.raises(ClusterError, match="closed the connection"):
        await to_thread.run_sync(asked.node_configs, "kube-system")


@pytest.mark.anyio
async def test_an_older_version_that_is_unknown_hides_no_failure(server: ApiServer, tmp_path: Path) -> None:
    await filled(server)
    server.faults.add(Fault(on("/apis/cilium.io/v2/"), times=-1, status=403))
    result = await asked(server, tmp_path)
    assert result.exit_code == 1
    assert "Build config failed: 403 Forbidden" in result.output
