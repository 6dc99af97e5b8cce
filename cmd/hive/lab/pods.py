"""Attach pods to a lab node and detach them by the real CNI plugin, called as a container runtime does.

Source: the CNI specification, sections 2 and 3.
"""

import hashlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hive
from hive.lab.node import PODS, Lab, LabError

PLUGIN = Path(hive.__file__).parent / "bin" / "cilium-cni"
INTERFACE = "eth0"
CNI_TIMEOUT = 150.0
"""Seconds; longer than the plugin's own timeout for the agent."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The plugin's result for a pod, and how long it took."""

    pod: str
    ipv4: str
    """Empty if the family is disabled, as ipv6."""
    gateway: str
    """The gateway of IPv4; of IPv6 if IPv4 is disabled."""
    pod_mac: str
    host_link: str
    host_mac: str
    seconds: float
    ipv6: str = ""


def add(lab: Lab, pod: str, namespace: str = "default") -> Attached:
    """Create a pod's network namespace and attach it; a failure removes the namespace. Raises LabError."""
    lab.hold_pod(pod)
    try:
        result, seconds = call(lab, pod, "ADD", namespace)
    except BaseException:
        lab.release_pod(pod)
        raise
    host, inner = result["interfaces"]
    addresses = {6 if ":" in each["address"] else 4: each for each in result["ips"]}
    address = addresses[4 if 4 in addresses else 6]
    return Attached(
        pod=pod,
        ipv4=addresses[4]["address"].partition("/")[0] if 4 in addresses else "",
        gateway=address["gateway"],
        ipv6=addresses[6]["address"].partition("/")[0] if 6 in addresses else "",
        pod_mac=inner["mac"],
        host_link=host["name"],
        host_mac=host["mac"],
        seconds=seconds,
    )


def delete(lab: Lab, pod: str, namespace: str = "default") -> float:
    """Detach a pod and release its network namespace; return the plugin's seconds. Raises LabError."""
    _, seconds = call(lab, pod, "DEL", namespace)
    lab.release_pod(pod)
    return seconds


def container_id(lab: Lab, pod: str) -> str:
    """Return a container id of 64 hexadecimal digits that is always the same for a pod."""
    return hashlib.sha256(f"{lab.name}/{pod}".encode()).hexdigest()


def call(lab: Lab, pod: str, command: str, namespace: str = "default") -> tuple[dict[str, Any], float]:
    """Run the plugin inside the node; return its JSON result (empty for DEL) and the seconds it took."""
    if not PLUGIN.exists():
        raise LabError(f"the CNI plugin is not built ({PLUGIN} is missing): run make install")
    environment = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": container_id(lab, pod),
        "CNI_NETNS": str(PODS / pod),
        "CNI_IFNAME": INTERFACE,
        "CNI_PATH": str(PLUGIN.parent),
        "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={pod}",
    }
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    began = time.monotonic()
    with lab.open() as node, node.popen([PLUGIN], env=environment, **streams) as plugin:
        try:
            stdout, stderr = plugin.communicate(network_configuration(lab), timeout=CNI_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise LabError(f"the CNI plugin did not finish {command} of {pod} in {CNI_TIMEOUT:g} s") from None
        finally:
            plugin.kill()
    seconds = time.monotonic() - began
    try:
        answer = json.loads(stdout) if stdout.strip() else {}
    except ValueError:
        raise LabError(f"the CNI plugin answered {command} of {pod} with {stdout!r}") from None
    if plugin.returncode != 0:
        reason = answer.get("msg") or stderr.decode(errors="replace").strip() or plugin.returncode
        raise LabError(f"the CNI plugin refused {command} of {pod}: {reason}")
    return answer, seconds


def network_configuration(lab: Lab) -> bytes:
    """Return the plugin's stdin: our plugin's entry of the agent's configuration list."""
    try:
        conflist = json.loads(lab.cni_conf.read_bytes())
    except FileNotFoundError:
        raise LabError(f"the agent of node {lab.name} has not written {lab.cni_conf}") from None
    (plugin,) = conflist["plugins"]
    return json.dumps({**plugin, "cniVersion": conflist["cniVersion"], "name": conflist["name"]}).encode()
