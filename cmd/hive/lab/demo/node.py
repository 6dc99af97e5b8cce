"""``hive lab demo``, the first part: one node, pods, an upgrade under traffic; each claim is checked."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hive.client import ask
from hive.endpoint import command as endpoint
from hive.lab import agent_process, pods
from hive.lab.demo.teardown import remove_node, wait_empty
from hive.lab.demo.traffic_checks import TrafficChecks
from hive.lab.demo.transcript import WIDTH, Transcript
from hive.lab.demo.upgrade import RATE, ids, report, second_build, upgrade
from hive.lab.kernel import BPFObjects, PodResources, bpf_objects, lab_links, pod_resources
from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, PREFIX, Lab, LabError, create, destroy
from hive.lab.pods import Attached
from hive.lab.traffic.probe import interfaces, routes

PODS = ("pod-1", "pod-2")
SETTINGS = ("--enable-ipv6=true",) if Path("/proc/net/if_inet6").exists() else ()
"""Settings of the agents: both families, if the kernel has them."""


def remove_leftovers(lab: Lab) -> None:
    """Remove the leftovers of a killed demo. Raises LabError if a node of that name is in use."""
    if agent_process.running(lab) is not None:
        raise LabError(
            f"a node named {lab.name} is running: remove it (hive lab down --name {lab.name}), "
            "or choose another --name"
        )
    destroy(lab)


def run(lab: Lab, transcript: Transcript) -> None:
    """Run the demo on a node called ``lab.name``, then remove it, even after an error."""
    transcript.title(
        "hive lab demo",
        "A node of its own on this machine: own network, own mounts, own bpffs. In it run the real agent "
        "and the real CNI plugin; pods are network namespaces, as a container runtime makes them. "
        "What is claimed is checked.",
    )
    machine = lab_links()
    demo = Demo(lab, transcript)
    try:
        for chapter in (
            demo.node,
            demo.agent,
            demo.pods,
            demo.check_traffic,
            demo.endpoints,
            demo.upgrade,
            demo.remove_pods,
        ):
            chapter()
    except click.ClickException as error:
        transcript.fail(error.format_message())
    except (OSError, RuntimeError, ValueError) as error:
        transcript.fail(f"{type(error).__name__}: {error}")
    finally:
        remove_node(lab, transcript, demo.kernels, machine)


class Demo:
    """The chapters in order; later ones use the results of earlier ones."""

    def __init__(self, lab: Lab, transcript: Transcript) -> None:
        self._lab = lab
        self._transcript = transcript
        self._traffic = TrafficChecks(transcript)
        self._attached: dict[str, Attached] = {}
        self._without_pods = PodResources(frozenset(), frozenset(), frozenset(), frozenset())
        self.kernels: list[BPFObjects] = []
        """Snapshots of the node's BPF objects."""

    def node(self) -> None:
        """Create namespaces and mounts."""
        self._transcript.step(
            "node", "A node", "Its namespaces are held by bind mounts: they need no process."
        )
        create(self._lab)
        with self._lab.open() as node:
            links = node.run(interfaces)
        seen = [(link.name, link.up, link.addresses) for link in links]
        self._transcript.check(
            "it has an uplink and nothing else",
            seen == [("uplink", True, (f"{NODE_ADDRESS}/{PREFIX}",))],
            ", ".join(f"{name} {' '.join(addresses)}" for name, _, addresses in seen),
        )

    def agent(self) -> None:
        """Start the agent on an empty node."""
        self._transcript.step(
            "agent",
            "The agent starts",
            "It pins its BPF maps, loads the eBPF programs, makes the pods' gateway (cilium_host), and then "
            "it writes the configuration that names the CNI plugin to container runtimes.",
        )
        pid = agent_process.start(self._lab, *SETTINGS)
        seconds = agent_process.wait_ready(self._lab, pid)
        self._transcript.measured["agent_start_seconds"] = round(seconds, 3)
        self._transcript.check("it serves", True, f"pid {pid}, {seconds * 1000:.0f} ms after its start")
        with self._lab.open() as node:
            kernel = self._look(node)
            self._without_pods = node.run(pod_resources)
        self._transcript.check(
            "maps and programs are pinned",
            bool(kernel.maps and kernel.entries),
            f"{len(kernel.maps)} maps; programs {ids(kernel.entries.values())}",
        )
        self._transcript.check("the network configuration is there", True, self._lab.cni_conf.name)

    def pods(self) -> None:
        """Attach two pods through the plugin, and look inside."""
        self._transcript.step(
            "pods",
            "Two pods are added",
            "The plugin hands each pod's namespace to the agent, which gives it an address, a link and a "
            "policy map. No program is loaded for a pod: what differs between pods is in maps.",
        )
        for name in PODS:
            pod = self._attached[name] = pods.add(self._lab, name)
            addresses = ", ".join(filter(None, (pod.ipv4, pod.ipv6)))
            self._transcript.check(f"{name} is added", True, f"{addresses}, in {pod.seconds * 1000:.1f} ms")
            self._inside(pod)
        before = self.kernels[-1]
        with self._lab.open() as node:
            after = self._look(node)
        self._transcript.check(
            "no program was loaded for them",
            before.program_ids == after.program_ids,
            f"still {ids(after.entries.values())}",
        )
        self._transcript.measured["pods"] = {
            name: {**asdict(pod), "seconds": round(pod.seconds, 6)} for name, pod in self._attached.items()
        }

    def check_traffic(self) -> None:
        """Ping and TCP between node and pods."""
        self._transcript.step(
            "talk",
            "They talk",
            "Every packet passes our eBPF at the pod's link: source address check, connection tracking, "
            "policy, and on to the other pod's link. ARP and neighbour discovery are answered there, too.",
        )
        lab, (one, two) = self._lab, (self._attached[name] for name in PODS)
        with lab.open() as node, lab.open_pod(one.pod) as first, lab.open_pod(two.pod) as second:
            self._traffic.ping(f"ping {one.pod} → {two.pod}", first, two.ipv4)
            self._traffic.echo(f"TCP  {one.pod} → {two.pod}", first, second, two.ipv4, one.ipv4)
            self._traffic.ping(f"ping {two.pod} → {one.pod}", second, one.ipv4)
            self._traffic.echo(f"TCP  {two.pod} → {one.pod}", second, first, one.ipv4, two.ipv4)
            self._traffic.ping(f"ping {one.pod} → node", first, NODE_ADDRESS)
            self._traffic.echo(f"TCP  {one.pod} → node", first, node, NODE_ADDRESS, one.ipv4)
            self._traffic.ping(f"ping node  → {two.pod}", node, two.ipv4)
            self._traffic.echo(f"TCP  node  → {two.pod}", node, second, two.ipv4, two.gateway)
            self._traffic.ping(f"ping {one.pod} → its gateway", first, one.gateway)
            if one.ipv6:
                self._traffic.ping(f"ping {one.pod} → {two.pod}, IPv6", first, two.ipv6)
                self._traffic.echo(f"TCP  {one.pod} → {two.pod}, IPv6", first, second, two.ipv6, one.ipv6)
                self._traffic.ping(f"ping node  → {two.pod}, IPv6", node, two.ipv6)

    def endpoints(self) -> None:
        """Show the output of ``hive endpoint list``."""
        self._transcript.step("endpoints", "What the agent knows", "hive endpoint list, as on any node:")
        found = self._endpoints()
        self._transcript.show(endpoint.render(found, WIDTH - 7))
        listed = {endpoint.addresses(one)["ipv4"]: one["status"]["state"] for one in found}
        self._transcript.check(
            "both pods are listed and ready",
            listed == {pod.ipv4: "ready" for pod in self._attached.values()},
            ", ".join(f"{address} {state}" for address, state in sorted(listed.items())),
        )

    def upgrade(self) -> None:
        """Kill the agent and start another build, under traffic."""
        self._transcript.step(
            "upgrade",
            "The agent is killed and comes back with another build of the datapath",
            f"Meanwhile {PODS[0]} sends {PODS[1]} {RATE:.0f} numbered UDP packets a second, and writes to an "
            "open TCP connection. What is pinned forwards without an agent; the new one loads its programs "
            "beside the old ones, tests them, and then switches over.",
        )
        build = second_build(self._lab)
        first, second = (self._attached[name] for name in PODS)
        seen = upgrade(self._lab, first, second, build, SETTINGS)
        self.kernels += [seen.before, seen.after]
        report(self._transcript, seen)
        addresses = {endpoint.addresses(one)["ipv4"] for one in self._endpoints()}
        self._transcript.check(
            "the new agent knows both pods",
            addresses == {pod.ipv4 for pod in self._attached.values()},
            ", ".join(sorted(addresses)),
        )

    def remove_pods(self) -> None:
        """Detach the pods through the plugin; the node is as before."""
        self._transcript.step(
            "delete",
            "The pods are deleted",
            "The plugin answers once maps and state are removed; the links follow at once.",
        )
        for name in list(self._attached):
            seconds = pods.delete(self._lab, name)
            del self._attached[name]
            self._transcript.check(f"{name} is deleted", True, f"in {seconds * 1000:.1f} ms")
        with self._lab.open() as node:
            left = wait_empty(lambda: node.run(pod_resources).added_since(self._without_pods))
        self._transcript.check(
            "no link, map row, pin or state of them is left",
            not left,
            ", ".join(left) or "all as before they came",
        )

    def _look(self, node: Namespaces) -> BPFObjects:
        kernel = node.run(bpf_objects)
        self.kernels.append(kernel)
        return kernel

    def _endpoints(self) -> list[dict[str, Any]]:
        pid = agent_process.running(self._lab)
        if pid is None:
            raise LabError(f"the agent has ended:\n{agent_process.log_end(self._lab)}")
        found: list[dict[str, Any]] = ask("/v1/endpoint", agent_process.api_socket(pid))
        return sorted(found, key=lambda one: one["id"])

    def _inside(self, pod: Attached) -> None:
        with self._lab.open() as node, self._lab.open_pod(pod.pod) as namespaces:
            host = next((one for one in node.run(interfaces) if one.name == pod.host_link), None)
            link = next(one for one in namespaces.run(interfaces) if one.name == pods.INTERFACE)
            found = namespaces.run(routes)
        self._transcript.show(
            [
                f"{link.name}  {' '.join(link.addresses)}  MAC {link.mac}  MTU {link.mtu}",
                *(f"      route {route}" for route in found),
                f"      on the node {pod.host_link}  MAC {pod.host_mac}",
            ]
        )
        pod_as_reported = (link.addresses, link.mac, link.up) == ((f"{pod.ipv4}/32",), pod.pod_mac, True)
        host_as_reported = host is not None and host.up and host.mac == pod.host_mac
        default = any(route.destination == "default" and route.gateway == pod.gateway for route in found)
        self._transcript.check(
            "it is as the plugin reported",
            pod_as_reported and host_as_reported and default,
            f"address, MACs, default route by {pod.gateway}",
        )
