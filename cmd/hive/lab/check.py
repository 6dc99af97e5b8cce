"""``hive lab check``: run the checks of ``hive check`` in a running lab, with temporary pods and objects."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import click

from hive.check import report
from hive.check.objects import (
    HOST_PORT,
    NAMESPACE,
    OPEN,
    ROLES,
    SHUT,
    name_of,
    namespace_object,
    pod_object,
    server_name,
    service_object,
)
from hive.check.probe import Answer, Server, Try, attempt
from hive.check.run import Facts, Place, Role, Run, Service
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.children import Child, Stop, signals_blocked
from hive.lab.cluster import Cluster
from hive.lab.cluster.manifests import Manifests, Object, with_defaults
from hive.lab.cluster.network import Place as NodePlace
from hive.lab.names import manifests_named, name_option
from hive.lab.namespaces import Namespaces
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab, LabError, exclusive, need_root
from hive.signals import signals_as_interrupts

PODS, SERVICES, POLICIES, SPACE = "check-pods", "check-services", "check-policies", "check-namespace"
"""Files of the objects of a check."""
OUTSIDE: Final = "outside"
_DAY: Final = 86400.0


@click.command()
@name_option()
@report.options
def check(lab: Lab, only: tuple[str, ...], skip: tuple[str, ...], within: float, as_json: bool) -> None:
    """Test the lab's network: pods, nodes, services, policies, packet sizes, the outside.

    Makes pods and objects of its own, in the namespace hive-check, and removes them. Exits 0 when every
    check passed or was skipped, 1 when one failed.
    """
    need_root()
    names = report.chosen(only, skip)
    with signals_as_interrupts(), LabSite(manifests_named(lab)) as site:
        report.perform(Run(site, within=within), names, as_json=as_json)


class LabSite:
    """Implements Site for the nodes of a lab; leaving the block removes its pods and objects."""

    namespace = NAMESPACE
    host_port = HOST_PORT

    def __init__(self, manifests: Manifests) -> None:
        self._manifests = manifests
        self._labs = {lab.name: lab for lab in manifests.nodes}
        self._where: dict[str, Namespaces] = {}
        self._open = ExitStack()
        self._servers: list[Child[None]] = []
        self.untried = {"dns": "the lab has no DNS server for services"}

    def __enter__(self) -> LabSite:
        """Lock the lab for this check. Raises LabError while another check runs."""
        first = self._manifests.nodes[0]
        self._lock = os.open(first.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LabError(f"another check is at work in {first.name}: wait until it ends") from error
        with exclusive():
            self._remove_objects()  # of a check that was killed
        return self

    def __exit__(self, *_: object) -> None:
        with signals_blocked(), exclusive():
            try:
                for server in self._servers:
                    server.kill()
                self._open.close()
                self._remove_objects()
            finally:
                os.close(self._lock)

    def facts(self) -> Facts:
        """See Site."""
        without, routing = {}, ""
        for name, lab in self._labs.items():
            pid = agent_process.running(lab)
            if pid is None:
                without[name] = "no agent runs (hive lab restart)"
                continue
            try:
                found = ask("/v1/healthz", agent_process.api_socket(pid))
            except click.ClickException as error:
                without[name] = error.format_message()
                continue
            if (state := found.get("cilium") or {}).get("state") != "Ok":
                without[name] = (
                    f"the agent is not well: {state.get('msg') or state.get('state')} (hive status)"
                )
                continue
            if not ((found.get("kube-proxy-replacement") or {}).get("features") or {}).get("nodePort"):
                self.untried["node-port"] = (
                    "no kube-proxy runs here, and kube-proxy-replacement is off "
                    "(hive lab restart --kube-proxy-replacement=true)"
                )
            mode = found.get("routing") or {}
            routing = mode.get("tunnel-protocol") or mode.get("inter-host-routing-mode", "").lower()
        cluster = next(iter(self._labs.values())).cluster or next(iter(self._labs))
        return Facts(f"lab {cluster}", tuple(self._labs), without, routing or "unknown")

    def start(self, nodes: Sequence[str]) -> tuple[list[Place], dict[str, str]]:
        """See Site."""
        with exclusive():
            return self._start(nodes)

    def _start(self, nodes: Sequence[str]) -> tuple[list[Place], dict[str, str]]:
        self._manifests.write(SPACE, [namespace_object(NAMESPACE)])
        objects = {(role, node): _pod(role, node) for node in nodes for role in ROLES if role != "host"}
        self._manifests.write(PODS, objects.values())
        places: list[Place] = []
        failed: dict[str, str] = {}
        for (role, node), pod in objects.items():
            if node in failed:
                continue
            try:
                place = self._attach(self._labs[node], role, pod)
            except LabError as error:
                failed[node] = error.format_message()
            else:
                places.append(place)
        self._manifests.write(PODS, objects.values())
        known = [one for one, _ in self._manifests.objects()]
        services = [service_object(node, NAMESPACE) for node in nodes]
        self._manifests.write(SERVICES, with_defaults(services, known))
        self._manifests.follow_services()
        able = [node for node in nodes if node not in failed]
        places += [self._host(self._labs[node]) for node in able]
        if able:
            places.append(self._outside(self._labs[able[0]]))
        for place in places:
            if place.role != "client" and place.node not in failed:
                ports = (HOST_PORT,) if place.role == "host" else (OPEN, SHUT)
                self._servers.append(self._where[place.name].start(_serve, self._lock, place.name, ports))
        return places, failed

    def ask(self, tries: Mapping[Place, Sequence[Try]]) -> Mapping[Place, Sequence[Answer]]:
        """See Site."""
        children = {
            place: self._where[place.name].start(_attempt, self._lock, list(each))
            for place, each in tries.items()
        }
        try:
            return {place: child.result(_DAY) for place, child in children.items()}
        finally:
            for child in children.values():
                child.kill()

    def services(self) -> Mapping[str, Service]:
        """See Site."""
        objects = [one for one, file in self._manifests.objects() if file == f"{SERVICES}.yaml"]
        specs = {one["metadata"]["name"]: one["spec"] for one in objects}
        found = {node: specs.get(server_name(node)) for node in self._labs}
        return {
            node: Service((spec["clusterIP"],), spec["ports"][0]["port"], spec["ports"][0]["nodePort"])
            for node, spec in found.items()
            if spec is not None
        }

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """See Site."""
        self._manifests.write(POLICIES, [dict(one) for one in objects])

    def remove(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """See Site."""
        del objects  # all there are
        self._manifests.remove(POLICIES)

    def _attach(self, lab: Lab, role: str, pod: Object) -> Place:
        """Attach a pod, and write its addresses into its object. Raises LabError."""
        name = pod["metadata"]["name"]
        agent_process.wait_for_pod(lab, NAMESPACE, name)
        attached = pods.add(lab, name, NAMESPACE)
        addresses = [ip for ip in (attached.ipv4, attached.ipv6) if ip]
        ips = {"podIP": addresses[0], "podIPs": [{"ip": ip} for ip in addresses]}
        pod["status"] = {"phase": "Running", "hostIP": _addresses(lab)[0], **ips}
        self._where[name] = self._open.enter_context(lab.open_pod(name))
        return Place(name, lab.name, _role(role), tuple(addresses))

    def _host(self, lab: Lab) -> Place:
        name = name_of("host", lab.name)
        self._where[name] = self._open.enter_context(lab.open())
        return Place(name, lab.name, "host", _addresses(lab))

    def _outside(self, lab: Lab) -> Place:
        if lab.cluster:
            network = Cluster(lab.cluster).network
            self._where[OUTSIDE] = self._open.enter_context(network.open())
            addresses = _place_of(lab).routers
        else:
            self._where[OUTSIDE] = self._open.enter_context(lab.open_outside())
            addresses = (OUTSIDE_ADDRESS, "")
        return Place(OUTSIDE, lab.name, "outside", tuple(filter(None, addresses)))

    def _remove_objects(self) -> None:
        ours = {(one["kind"], one["metadata"]["name"]) for one, file in self._manifests.objects()
                if file == f"{PODS}.yaml"}  # fmt: skip
        for name in (POLICIES, SERVICES, PODS):
            self._manifests.remove(name)
        self._manifests.follow_services()
        for lab in self._labs.values():
            for _, name in ours:
                if name in lab.pods():
                    pods.delete(lab, name, NAMESPACE)
        self._manifests.remove(SPACE)


def _pod(role: str, node: str) -> Object:
    """Return the object of a pod that is not attached yet."""
    return pod_object(role, node, NAMESPACE, "hive", ()) | {"status": {"phase": "Pending"}}


def _role(role: str) -> Role:
    return "client" if role == "client" else "server"


def _place_of(lab: Lab) -> NodePlace:
    return Cluster(lab.cluster).place(lab)


def _addresses(lab: Lab) -> tuple[str, ...]:
    """Return the addresses of a node."""
    if not lab.cluster:
        return (NODE_ADDRESS,)
    place = _place_of(lab)
    return (place.ipv4, place.ipv6)


def _serve(stop: Stop, lock: int, name: str, ports: Sequence[int]) -> None:
    os.close(lock)  # of a check that was killed no lock stays
    server = Server(name, ports)
    server.start()
    stop.wait(_DAY)


def _attempt(_: Stop, lock: int, tries: Sequence[Try]) -> list[Answer]:
    os.close(lock)
    return attempt(tries)
