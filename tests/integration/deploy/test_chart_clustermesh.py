"""Remote clusters as values: the Secret that agents watch, host aliases, and rejected values."""

from __future__ import annotations

import base64
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from cells.kvstore.settings import StoreOptions, read_access
from tests.integration.deploy.rendered import CONFIG, load, served
from tests.support import chart

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

FOLDER = "/var/lib/cilium/clustermesh"
TLS = {"caCert": "Y2E=", "cert": "Y2VydA==", "key": "a2V5"}


def rendered(*clusters: dict[str, Any], **config: Any) -> dict[str, Any]:
    """The objects of a cluster in a mesh."""
    mesh = {"config": {"enabled": True, "clusters": list(clusters), **config}}
    return chart.objects({"cluster": {"name": "west", "id": 1}, "clustermesh": mesh})


def files(objects: dict[str, Any]) -> dict[str, str]:
    """What is in the Secret, as agents find it."""
    data = objects["Secret/cilium-clustermesh"]["data"]
    return {name: base64.b64decode(text).decode() for name, text in data.items()}


def test_a_cluster_is_found_by_its_addresses_or_its_name() -> None:
    ips = ["172.18.255.201", "172.18.255.202"]
    objects = rendered(
        {"name": "east", "port": 2379, "ips": ips},
        {"name": "north", "port": 32379, "address": "etcd.north.example"},
        domain="mesh.example",
    )
    found = files(objects)
    assert {name: yaml.safe_load(text)["endpoints"] for name, text in found.items()} == {
        "east": ["https://east.mesh.example:2379"],
        "north": ["https://etcd.north.example:32379"],
    }
    aliases = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]["hostAliases"]
    assert aliases == [{"ip": one, "hostnames": ["east.mesh.example"]} for one in ips]
    assert objects[CONFIG]["data"]["cluster-id"] == "1"


def test_certificates_are_those_of_the_values_or_of_the_local_secret(tmp_path: Any) -> None:
    objects = rendered(
        {"name": "east", "port": 2379, "address": "east", "tls": TLS},
        {"name": "north", "port": 2379, "address": "north", "tls": None},
    )
    found = files(objects)
    spec = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]
    (volume,) = (one for one in spec["volumes"] if one["name"] == "clustermesh-secrets")
    mounted = dict(found)
    for source in volume["projected"]["sources"]:
        for item in source["secret"].get("items", ()):
            mounted[item["path"]] = f"{source['secret']['name']} {item['key']}"
    (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "clustermesh-secrets")
    assert PurePosixPath(mount["mountPath"]) == PurePosixPath(FOLDER)
    for name, text in mounted.items():
        (tmp_path / name).write_text(text.replace(FOLDER, str(tmp_path)))
    east, north = (read_access(StoreOptions(config=str(tmp_path / name))) for name in ("east", "north"))
    assert (east.ca, east.certificate, east.key) == (b"ca", b"cert", b"key")
    common = "clustermesh-apiserver-remote-cert"
    assert (north.ca, north.certificate) == (f"{common} ca.crt".encode(), f"{common} tls.crt".encode())


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ({"port": 2379, "address": "a"}, r"clusters\[0\].name=: expected the name of a cluster"),
        ({"name": "East", "port": 2379, "address": "a"}, "name=East: expected the name of a cluster"),
        ({"name": "east", "port": 2379}, "expected ips or address: where the etcd of east is"),
        ({"name": "east", "address": "a"}, "expected port: that of the etcd of east"),
    ],
)
def test_clusters_that_cannot_be_found_are_refused(cluster: dict[str, Any], reason: str) -> None:
    with pytest.raises(chart.RenderError, match=reason):
        rendered(cluster)


def test_of_two_clusters_with_one_name_the_second_is_refused() -> None:
    one = {"name": "east", "port": 2379, "address": "a"}
    with pytest.raises(chart.RenderError, match=r"clusters\[1\].name=east: another cluster has the name"):
        rendered(one, one)


def test_writers_for_other_clusters_are_refused_by_name() -> None:
    for value in ("useAPIServer", "enableEndpointSliceSynchronization", "enableMCSAPISupport"):
        with pytest.raises(chart.RenderError, match=f"clustermesh.{value}: a value of Cilium's chart"):
            chart.objects({"cluster": {"name": "west", "id": 1}, "clustermesh": {value: True}})


def test_without_remote_clusters_there_is_no_secret_and_one_of_another_origin_is_mounted() -> None:
    objects = chart.objects({"cluster": {"name": "west", "id": 1}})
    assert "Secret/cilium-clustermesh" not in objects
    spec = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]
    assert {"name": "CILIUM_CLUSTERMESH_CONFIG", "value": f"{FOLDER}/"} in spec["containers"][0]["env"]
    assert "hostAliases" not in spec


def volumes(objects: dict[str, Any], of: str) -> dict[str, Any]:
    """Name -> volume of a workload."""
    return {one["name"]: one for one in objects[of]["spec"]["template"]["spec"]["volumes"]}


def test_authorities_may_be_those_of_a_bundle() -> None:
    recorded = load("config-ca-bundle")["diff"]["DaemonSet/cilium"]
    objects, left = served("config-ca-bundle")
    assert not left
    found = volumes(objects, "DaemonSet/cilium")
    for name in ("clustermesh-secrets", "hubble-tls"):
        ((_, wanted),) = (change for at, change in recorded.items() if f"[name={name}]" in at)
        assert found[name]["projected"]["sources"] == wanted


def test_authorities_are_of_a_config_map_unless_of_a_secret() -> None:
    server = {"enabled": True, "server": {"mtls": {"enabled": True}}}
    relay = {"enabled": True, "image": {"repository": "relay", "tag": "1"}}
    hubble = {"enabled": True, "metrics": {"enabled": ["flow"], "tls": server}, "relay": relay}
    objects = chart.objects({"tls": {"caBundle": {"enabled": True}}, "hubble": hubble})
    bundle = {"name": "cilium-root-ca.crt", "optional": True}

    def item(path: str) -> list[dict[str, str]]:
        return [{"key": "ca.crt", "path": path}]

    found = volumes(objects, "DaemonSet/cilium")
    for name in ("hubble-tls", "hubble-metrics-tls"):
        sources = found[name]["projected"]["sources"]
        assert [{"configMap": bundle | {"items": item("client-ca.crt")}}] == sources[1:]
        assert {one["key"] for one in sources[0]["secret"]["items"]} == {"tls.crt", "tls.key"}
    sources = volumes(objects, "Deployment/hubble-relay")["tls"]["projected"]["sources"]
    assert sources[1:] == [{"configMap": {"name": bundle["name"], "items": item("hubble-server-ca.crt")}}]
