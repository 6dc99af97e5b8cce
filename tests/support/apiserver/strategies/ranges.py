"""Cluster addresses and node ports: what is free, and the service every cluster has.

Gives: Ranges.
"""

from __future__ import annotations

import ipaddress
import uuid
from typing import Any

from tests.support.apiserver.call import now
from tests.support.apiserver.errors import Obj, Resource

IPV4 = ipaddress.ip_network("10.96.0.0/16")
IPV6 = ipaddress.ip_network("fd00:10:96::/112")
FIRST_NODE_PORT, LAST_NODE_PORT = 30000, 32767


class Ranges:
    """What services are given."""

    def __init__(self, *, dual_stack: bool) -> None:
        self.families = ("IPv4", "IPv6") if dual_stack else ("IPv4",)
        self._addresses: set[str] = set()
        self._ports: set[int] = set()
        self._next = {"IPv4": 256, "IPv6": 256}
        self._next_port = FIRST_NODE_PORT + 100

    def network(self, family: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """The range of a family."""
        return IPV4 if family == "IPv4" else IPV6

    def address(self, family: str) -> str:
        """A free address, taken."""
        network = self.network(family)
        while True:
            self._next[family] += 1
            found = str(network[self._next[family]])
            if found not in self._addresses:
                self._addresses.add(found)
                return found

    def take(self, address: str) -> str:
        """Take this address; why it cannot be had, or nothing."""
        wanted = ipaddress.ip_address(address)
        network = self.network(f"IPv{wanted.version}")
        if wanted not in network:
            return (
                f"the provided IP ({address}) is not in the valid range. The range of valid IPs is {network}"
            )
        if address in self._addresses:
            return "provided IP is already allocated"
        self._addresses.add(address)
        return ""

    def port(self) -> int:
        """A free node port, taken."""
        while self._next_port in self._ports:
            self._next_port += 1
        self._ports.add(self._next_port)
        return self._next_port

    def take_port(self, port: int) -> str:
        """Take this port; why it cannot be had, or nothing."""
        if not FIRST_NODE_PORT <= port <= LAST_NODE_PORT:
            valid = f"{FIRST_NODE_PORT}-{LAST_NODE_PORT}"
            return f"provided port is not in the valid range. The range of valid ports is {valid}"
        if port in self._ports:
            return "provided port is already allocated"
        self._ports.add(port)
        return ""

    def release(self, service: Obj) -> None:
        """What a service had is free again."""
        spec = service.get("spec") or {}
        self._addresses -= set(spec.get("clusterIPs") or ())
        self._ports -= {one["nodePort"] for one in spec.get("ports") or () if one.get("nodePort")}
        if spec.get("healthCheckNodePort"):
            self._ports.discard(spec["healthCheckNodePort"])

    def bootstrap(self, server: Any) -> None:
        """The service ``kubernetes`` with its EndpointSlice."""
        address = str(IPV4[1])
        self._addresses.add(address)
        metadata = {
            "name": "kubernetes",
            "namespace": "default",
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now(),
            "labels": {"component": "apiserver", "provider": "kubernetes"},
        }
        spec = {
            "ports": [{"name": "https", "protocol": "TCP", "port": 443, "targetPort": 6443}],
            "clusterIP": address,
            "clusterIPs": [address],
            "type": "ClusterIP",
            "sessionAffinity": "None",
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
        }
        service: Obj = {
            "kind": "Service",
            "apiVersion": "v1",
            "metadata": metadata,
            "spec": spec,
            "status": {"loadBalancer": {}},
        }
        server.store.put(Resource("", "services"), ("default", "kubernetes"), service)
        slice_metadata = {
            "name": "kubernetes",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "kubernetes"},
        }
        body: Obj = {
            "kind": "EndpointSlice",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": slice_metadata,
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["192.0.2.10"], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": 6443, "protocol": "TCP"}],
        }
        server.add(body, manager="kube-apiserver")
