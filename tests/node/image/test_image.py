"""The chart's pods on a bare node, from the image alone, under containerd, with a fake API server."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hive import syscalls
from hive.lab import pods
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.support import chart
from tests.support.bare_node import VALUES, bare_node
from tests.support.cilium_cli import EXECS, sysdump
from tests.support.kubelet import Kubelet, KubePod
from tests.support.waiting import eventually

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]


@pytest.fixture
def kubelet(node: Lab, image: Path, tmp_path: Path) -> Iterator[Kubelet]:
    """Of a node without preparation."""
    with bare_node(node, tmp_path, image) as found:
        yield found


def deployed(kubelet: Kubelet) -> tuple[KubePod, KubePod]:
    """The agent's pod and the operator's, as the chart renders them."""
    objects: dict[str, Any] = chart.objects(VALUES)
    kubelet.config_maps["cilium-config"] = dict(objects["ConfigMap/cilium-config"]["data"])
    agent = kubelet.pod("cilium-x", objects["DaemonSet/cilium"]["spec"]["template"])
    return agent, kubelet.pod("cilium-operator-x", objects["Deployment/cilium-operator"]["spec"]["template"])


def runs_what_cilium_cli_runs(run: Callable[..., bytes]) -> None:
    """With the image's own programs; commands of ours are tested beside an agent that has more features."""
    for one in EXECS:
        if one.words[0] != "cilium":
            printed = run(*one.words).decode()
            assert one.reads(printed), f"{one.words}: {printed}"
    assert any(name.endswith("agent/healthz.json") for name in sysdump(run))


def test_a_bare_node_gets_pods_and_gives_them_up(node: Lab, kubelet: Kubelet) -> None:
    agent, operator = deployed(kubelet)
    plugins = kubelet.host_paths["/opt/cni/bin"]
    with node.open() as namespaces:
        settings = kubelet.folder / "volumes" / "cilium-x" / "tmp" / "cilium" / "config-map"
        assert "wrote" in agent.run("config")
        assert (settings / "cni-exclusive").read_text() == "true"
        sources = {"configSources": "config-map:kube-system/cilium-config,cilium-node-config:kube-system"}
        asking = chart.objects({**VALUES, "daemon": sources})["DaemonSet/cilium"]["spec"]["template"]
        assert "from config-map:kube-system/cilium-config" in kubelet.pod("cilium-y", asking).run("config")
        assert "mounted cgroup v2 on /run/cilium/cgroupv2" in agent.run("mount-cgroup")
        assert namespaces.run(os.path.ismount, "/run/cilium/cgroupv2")
        assert "sysctl config created" in agent.run("apply-sysctl-overwrites")
        assert namespaces.run(os.listdir, "/etc/sysctl.d") == ["99-zzz-override_cilium.conf"]
        assert "mounted bpffs on /sys/fs/bpf" in agent.run("mount-bpf-fs")
        assert namespaces.run(syscalls.filesystem_type, "/sys/fs/bpf") == syscalls.BPF_FS_MAGIC
        assert agent.run("clean-cilium-state") == ""
        assert "Wrote /host/opt/cni/bin/cilium-cni" in agent.run("install-cni-binaries")
        assert (plugins / "cilium-cni").read_bytes() == pods.PLUGIN.read_bytes()

        (node.cni_conf.parent / "10-other.conflist").write_text("{}")
        with operator.running("cilium-operator"), agent.running("cilium-agent"):
            eventually(node.cni_conf.exists)
            assert "this operator" in operator.exec("cilium-operator", "hive", "operator", "status")
            eventually((node.cni_conf.parent / "10-other.conflist.cilium_bak").exists)
            first, second = pods.add(node, "first"), pods.add(node, "second")
            assert first.ipv4.startswith("10.77.0."), "a range that the operator gave the node"
            with node.open_pod("first") as inside:
                assert inside.run(ping, second.ipv4, 3) != []
            assert "endpoint" in agent.exec("cilium-agent", "hive", "endpoint", "list").lower()
            runs_what_cilium_cli_runs(partial(agent.printed, "cilium-agent"))
            pods.delete(node, "second")

            assert "dns-proxy job=serve failures" not in agent.log("cilium-agent")
            assert "disabled" in agent.exec("cilium-agent", "/cni-uninstall.sh")
            assert node.cni_conf.exists()

        # A removed container leaves a working network, and one that comes back finds it.
        with node.open_pod("first") as inside:
            assert inside.run(ping, first.gateway, 3) != []
        kubelet.config_maps["cilium-config"]["cni-uninstall"] = "true"
        agent.run("config")
        with agent.running("cilium-agent"):
            listing = ("hive", "endpoint", "list", "-o", "json")
            eventually(lambda: '"first"' in agent.exec("cilium-agent", *listing))
            pods.delete(node, "first")
            assert "Removed" in agent.exec("cilium-agent", "/cni-uninstall.sh")
            assert not node.cni_conf.exists()

        output = agent.run("clean-cilium-state", CILIUM_ALL_STATE="true")
        assert "removed cilium_host" in output
        assert not namespaces.run(os.path.exists, "/sys/fs/bpf/cilium")
        assert namespaces.run(os.listdir, "/sys/fs/bpf/tc/globals") == []


def files_of(image: Path) -> Iterator[tarfile.TarInfo]:
    """Every file of every layer."""
    with tarfile.open(image) as archive:
        index = json.load(_blob(archive, "index.json"))
        manifest = json.load(_blob(archive, _path(index["manifests"][0])))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=_blob(archive, _path(layer)), mode="r:gz") as content:
                yield from content


def _path(descriptor: dict[str, Any]) -> str:
    return "blobs/" + str(descriptor["digest"]).replace(":", "/")


def _blob(archive: tarfile.TarFile, name: str) -> Any:
    return archive.extractfile(name)


def test_the_image_is_small_has_what_cilium_cli_runs_and_belongs_to_root(image: Path) -> None:
    names = set()
    for entry in files_of(image):
        assert (entry.uid, entry.gid) == (0, 0), entry.name
        assert not entry.mode & 0o6000, entry.name
        names.add(entry.name)
    assert image.stat().st_size < 60e6
    assert {
        *(f"usr/bin/{name}" for name in ("hive", "cilium", "cilium-dbg", "cilium-bugtool", "cilium-health")),
        *(f"usr/bin/{name}" for name in ("hubble", "jq", "timeout")),
        *(f"bin/{name}" for name in ("sh", "bash", "cat", "ls", "stat", "tail", "rm", "ip", "awk")),
        "usr/sbin/bpftool",
        "usr/share/sbom/hive-agent.spdx.json",
        "etc/ssl/certs/ca-certificates.crt",
    } <= names
    programs = {name.rpartition("/")[2] for name in names if name.rpartition("/")[0].endswith("bin")}
    assert not programs & {"dash", "su", "nc", "wget", "tcpdump", "dpkg"}
