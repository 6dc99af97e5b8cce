"""Runs a containerd for one test, and makes the CRI calls of a kubelet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from hive.lab.namespaces import Namespaces
from tests.support.pause import IMAGE, pause_image
from tests.support.runtime_place import RuntimePlace
from tests.support.waiting import eventually

PATIENCE = 90.0
"""Timeout of a call in seconds."""

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
    snapshotter = "{snapshotter}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{networks}"
"""


class Containerd:
    """``with Containerd(place) as runtime: (web,) = runtime.run("web-0")``; removes remaining pods at the
    end.

    ``images`` are archives to import beside the sandbox image, for the CRI or another namespace.
    """

    def __init__(
        self,
        place: RuntimePlace,
        *,
        images: Sequence[Path] = (),
        snapshotter: str = "native",
        namespace: str = "k8s.io",
    ) -> None:
        self._place = place
        self._images = images
        self._snapshotter = snapshotter
        self._socket = place.folder / "containerd.sock"
        self.address_options = ["--address", str(self._socket), "--namespace", namespace]
        """Options of ctr that name its socket."""
        proto = str(Path(__file__).with_name("cri.proto").relative_to(Path.cwd()))
        self._messages, self._services = grpc.protos_and_services(proto)
        self._sandboxes: list[str] = []

    def __enter__(self) -> Containerd:
        place = self._place
        config = place.folder / "config.toml"
        config.write_text(
            CONFIG.format(
                folder=place.folder,
                plugins=place.plugins,
                networks=place.networks,
                image=IMAGE,
                snapshotter=self._snapshotter,
            )
        )
        self._daemon = place.start(["containerd", "--config", str(config)])
        self._channel = grpc.insecure_channel(f"unix://{self._socket}")
        try:
            grpc.channel_ready_future(self._channel).result(timeout=60)
            self._runtime = self._services.RuntimeServiceStub(self._channel)
            importing = ["ctr", *self.address_options, "images", "import", "--snapshotter", self._snapshotter]
            for image in (pause_image(place.folder), *self._images):
                place.output_of(place.start([*importing, str(image)]))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.remove(*self._sandboxes)
        finally:
            self._channel.close()
            with self._daemon:
                self._daemon.terminate()

    def wait_for_network(self) -> None:
        """Wait until containerd has found the network configuration that an agent wrote."""
        eventually(self.network_ready)

    def network_ready(self) -> bool:
        """Return whether containerd has found a network configuration."""
        status = self._runtime.Status(self._messages.StatusRequest(), timeout=PATIENCE).status
        return any(condition.type == "NetworkReady" and condition.status for condition in status.conditions)

    def run(
        self, *names: str, namespace: str = "default", annotations: Mapping[str, str] | None = None
    ) -> list[str]:
        """Start pod sandboxes in parallel, as the kubelet does; return their ids in order."""
        message = self._messages
        requests = [
            message.RunPodSandboxRequest(config=self.sandbox(name, namespace, annotations)) for name in names
        ]
        answers = self._all(self._runtime.RunPodSandbox, requests)
        sandboxes = [str(answer.pod_sandbox_id) for answer in answers]
        self._sandboxes += sandboxes
        return sandboxes

    def sandbox(
        self,
        name: str,
        namespace: str = "default",
        annotations: Mapping[str, str] | None = None,
        *,
        host_network: bool = False,
        privileged: bool = False,
    ) -> Any:
        """Return the ``PodSandboxConfig`` of a pod."""
        message = self._messages
        uid = uid_of(name)
        network = message.NamespaceOption(network=2 if host_network else 0, pid=1)
        security = message.LinuxSandboxSecurityContext(namespace_options=network, privileged=privileged)
        return message.PodSandboxConfig(
            metadata=message.PodSandboxMetadata(name=name, uid=uid, namespace=namespace),
            hostname="" if host_network else name,
            log_directory=str(self._place.folder / "logs" / f"{namespace}_{name}_{uid}"),
            labels={
                "app": name.partition("-")[0],
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.namespace": namespace,
                "io.kubernetes.pod.uid": uid,
            },
            annotations={"kubernetes.io/config.source": "api", **(annotations or {})},
            linux=message.LinuxPodSandboxConfig(cgroup_parent=self._place.cgroup, security_context=security),
        )

    def run_sandbox(self, config: Any) -> str:
        """Start one sandbox and return its id."""
        (answer,) = self._all(
            self._runtime.RunPodSandbox, [self._messages.RunPodSandboxRequest(config=config)]
        )
        sandbox = str(answer.pod_sandbox_id)
        self._sandboxes.append(sandbox)
        return sandbox

    def call(self, operation: str, /, **fields: Any) -> Any:
        """Call any other operation of the CRI, such as ``StartContainer``, with the fields of its request."""
        request = self.message(f"{operation}Request", **fields)
        return getattr(self._runtime, operation)(request, timeout=PATIENCE)

    def message(self, name: str, /, **fields: Any) -> Any:
        """Return a message of the CRI."""
        return getattr(self._messages, name)(**fields)

    def remove(self, *sandboxes: str) -> None:
        """Stop and remove sandboxes in parallel."""
        message = self._messages
        stops = [message.StopPodSandboxRequest(pod_sandbox_id=sandbox) for sandbox in sandboxes]
        self._all(self._runtime.StopPodSandbox, stops)
        removals = [message.RemovePodSandboxRequest(pod_sandbox_id=sandbox) for sandbox in sandboxes]
        self._all(self._runtime.RemovePodSandbox, removals)
        self._sandboxes = [one for one in self._sandboxes if one not in sandboxes]

    def address(self, sandbox: str) -> str:
        """Return the sandbox's address, as the CRI reports it."""
        return str(self._status(sandbox).status.network.ip)

    def open(self, sandbox: str) -> Namespaces:
        """Open the sandbox's network namespace."""
        pid = json.loads(self._status(sandbox).info["info"])["pid"]
        return Namespaces.open(f"/proc/{pid}/ns/net")

    def _status(self, sandbox: str) -> Any:
        request = self._messages.PodSandboxStatusRequest(pod_sandbox_id=sandbox, verbose=True)
        return self._runtime.PodSandboxStatus(request, timeout=PATIENCE)

    def _all(self, call: Any, requests: list[Any]) -> list[Any]:
        """Wait for all results, return them in order, or raise the first error after the last has ended."""
        calls = [call.future(request, timeout=PATIENCE) for request in requests]
        errors = [error for error in (one.exception() for one in calls) if error]
        if errors:
            raise errors[0]
        return [one.result() for one in calls]


def uid_of(name: str) -> str:
    """Return the UID of a pod that run() starts."""
    return f"00000000-0000-4000-8000-{name.encode().hex()[-12:]:0>12}"
