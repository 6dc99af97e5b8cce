"""A containerd of the test's own: its folders, its image, the CRI calls a kubelet makes.

Needs: Debian's containerd and runc, musl-gcc for the pause image, grpcio.   Gives: Containerd.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from tests.support.waiting import eventually

PAUSE = "int pause(void); int main(void) { for (;;) pause(); }\n"
IMAGE = "test/pause:1"
CGROUP = "/hive-test-pods"

# No CAP_SYS_RESOURCE in many test machines: OOM scores stay where they are.
CONFIG = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{image}"
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{networks}"
"""


class Containerd:
    """``with Containerd(folder, plugins, networks, start=...) as runtime: runtime.run("web-0")``.

    ``plugins`` and ``networks`` are the CNI folders as the daemon sees them; ``start`` starts a
    command in the node's namespaces.
    """

    def __init__(
        self,
        folder: Path,
        plugins: Path,
        networks: Path,
        start: Callable[[list[str]], subprocess.Popen[bytes]],
    ) -> None:
        self._folder = folder
        self._start = start
        self._socket = folder / "containerd.sock"
        self._config = folder / "config.toml"
        self._config.write_text(CONFIG.format(folder=folder, plugins=plugins, networks=networks, image=IMAGE))
        proto = str(Path(__file__).with_name("cri.proto").relative_to(Path.cwd()))
        self._messages, self._services = grpc.protos_and_services(proto)
        self._sandboxes: list[str] = []

    def __enter__(self) -> Containerd:
        self._daemon = self._start(["containerd", "--config", str(self._config)])
        try:
            self._channel = grpc.insecure_channel(f"unix://{self._socket}")
            grpc.channel_ready_future(self._channel).result(timeout=20)
            self._runtime = self._services.RuntimeServiceStub(self._channel)
            archive = pause_image(self._folder)
            importing = [
                "ctr",
                "-a",
                str(self._socket),
                "-n",
                "k8s.io",
                "images",
                "import",
                "--snapshotter",
                "native",
            ]
            imported = self._start([*importing, str(archive)]).wait(timeout=20)
            assert imported == 0, "ctr could not import the pause image"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sandbox in list(self._sandboxes):
            self.remove(sandbox)
        self._channel.close()
        self._daemon.terminate()
        self._daemon.wait(timeout=20)
        remove_cgroups(CGROUP)

    def network_ready(self) -> bool:
        """Whether containerd has found a network configuration."""
        conditions = self._runtime.Status(self._messages.StatusRequest()).status.conditions
        return any(condition.type == "NetworkReady" and condition.status for condition in conditions)

    def run(self, name: str, namespace: str = "default") -> str:
        """Bring a pod sandbox up as the kubelet would; returns its id."""
        eventually(self.network_ready, within=20)
        message = self._messages
        config = message.PodSandboxConfig(
            metadata=message.PodSandboxMetadata(name=name, uid=f"uid-{name}", namespace=namespace),
            hostname=name,
            log_directory=str(self._folder / "logs"),
            labels={"app": name},
            linux=message.LinuxPodSandboxConfig(cgroup_parent=CGROUP),
        )
        sandbox: str = self._runtime.RunPodSandbox(message.RunPodSandboxRequest(config=config)).pod_sandbox_id
        self._sandboxes.append(sandbox)
        return sandbox

    def address(self, sandbox: str) -> str:
        """The sandbox's address, as the CRI reports it."""
        return str(self._status(sandbox).status.network.ip)

    def pid(self, sandbox: str) -> int:
        """Process id of the sandbox's pause process; its namespaces are the pod's."""
        return int(json.loads(self._status(sandbox).info["info"])["pid"])

    def remove(self, sandbox: str) -> None:
        """Stop and remove the sandbox."""
        self._runtime.StopPodSandbox(self._messages.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        self._runtime.RemovePodSandbox(self._messages.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        self._sandboxes.remove(sandbox)

    def _status(self, sandbox: str) -> Any:
        request = self._messages.PodSandboxStatusRequest(pod_sandbox_id=sandbox, verbose=True)
        return self._runtime.PodSandboxStatus(request)


def pause_image(folder: Path) -> Path:
    """A docker archive with one static program that waits, made without a network."""
    (folder / "pause.c").write_text(PAUSE)
    subprocess.run(
        ["musl-gcc", "-static", "-Os", "-s", "-o", folder / "pause", folder / "pause.c"],
        check=True,
        timeout=60,
    )
    layer = tar({"pause": (folder / "pause").read_bytes()}, mode=0o755)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [f"docker.io/{IMAGE}"], "Layers": ["layer.tar"]}]
    archive = folder / "pause.tar"
    archive.write_bytes(
        tar({name: config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()})
    )
    return archive


def tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """An uncompressed tar of ``files``, the same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def remove_cgroups(name: str) -> None:
    """Remove the (empty) cgroups called ``name`` in every mounted hierarchy."""
    for hierarchy in Path("/sys/fs/cgroup").iterdir():
        folder = hierarchy / name.strip("/")
        if folder.is_dir():
            for child in sorted(folder.rglob("*"), reverse=True):
                if child.is_dir():
                    child.rmdir()
            folder.rmdir()
