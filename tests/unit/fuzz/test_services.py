"""Services and slices with invalid values: each is served as far as it is valid."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.services import DEFAULT_SEED, LoadBalancerOptions, Seed, ServiceName, ServingNode
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.maglev import MaglevTables
from tests.support.catalog import LoneCatalog
from tests.unit.fuzz.inputs import bounded, json_values, odd_texts
from tests.unit.services.replay import RecordedMaps, finished

OPTIONS = LoadBalancerOptions(bpf_lb_algorithm="maglev", enable_service_topology=True)
NODE = ServingNode("node-1", "zone-a")

addresses = st.sampled_from(
    ["10.96.0.1", "10.96.0.2", "fd00::1", "::ffff:10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "None", ""]
) | odd_texts  # fmt: skip
ports = st.sampled_from([0, 1, 80, 8080, 30080, 65535, 65536, -1, 2**31, 2**63])
protocols = st.sampled_from(["TCP", "UDP", "SCTP", "ANY", "tcp", ""]) | odd_texts
policies = st.sampled_from(["Local", "Cluster", ""]) | odd_texts
several = st.lists(addresses, max_size=3)
service_ports = st.fixed_dictionaries(
    {"port": ports},
    optional={"name": odd_texts, "nodePort": ports, "protocol": protocols, "targetPort": json_values},
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "clusterIP": addresses,
        "clusterIPs": several,
        "externalIPs": several,
        "type": st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]) | odd_texts,
        "ports": st.lists(service_ports, max_size=3),
        "externalTrafficPolicy": policies,
        "internalTrafficPolicy": policies,
        "sessionAffinity": st.just("ClientIP") | odd_texts,
        "sessionAffinityConfig": st.fixed_dictionaries(
            {"clientIP": st.fixed_dictionaries({"timeoutSeconds": ports})}
        ),
        "loadBalancerSourceRanges": st.lists(st.sampled_from(["10.0.0.0/8", "::/0", "10.0.0.1"]) | odd_texts),
        "healthCheckNodePort": ports,
    },
)
texts = st.dictionaries(odd_texts, odd_texts, max_size=2)
own_notes = texts | st.fixed_dictionaries(
    {},
    optional={
        f"service.cilium.io/{each}": odd_texts for each in ("type", "lb-algorithm", "src-ranges-policy")
    },
)
ingress = st.fixed_dictionaries(
    {"loadBalancer": st.fixed_dictionaries({"ingress": st.lists(st.fixed_dictionaries({"ip": addresses}))})}
)
endpoints = st.fixed_dictionaries(
    {"addresses": several},
    optional={
        "conditions": st.dictionaries(st.sampled_from(["ready", "serving", "terminating"]), st.booleans()),
        "nodeName": st.just("node-1") | odd_texts,
        "zone": odd_texts,
        "hints": st.fixed_dictionaries({"forZones": st.lists(st.fixed_dictionaries({"name": odd_texts}))}),
    },
)
slices = st.fixed_dictionaries(
    {"addressType": st.sampled_from(["IPv4", "IPv6", "FQDN"]) | odd_texts},
    optional={
        "endpoints": st.lists(endpoints, max_size=4),
        "ports": st.lists(
            st.fixed_dictionaries({}, optional={"name": odd_texts, "port": ports, "protocol": protocols}),
            max_size=3,
        ),
    },
)


class Agent:
    """A control plane, and the maps as they are after every write."""

    def __init__(self) -> None:
        self.catalog = LoneCatalog(OPTIONS, NODE)
        self.maps: dict[str, dict[str, str]] = {}
        self.served = served_frontends()
        balancer = LoadBalancer(OPTIONS, self.served, MaglevTables(251, Seed.parse(DEFAULT_SEED)))
        self.target = ServicesTarget(self.catalog.frontends, balancer, RecordedMaps(self.maps), self.served)

    def write(self) -> None:
        for change in self.catalog.news():
            if change.row is not None:
                finished(self.target.put({change.key: change.row}))
            else:
                finished(self.target.drop([change.key]))

    def service(self, number: int, spec: Any, status: Any, notes: Any, labels: Any) -> None:
        metadata = {"name": f"s{number}", "namespace": "shop", "annotations": notes, "labels": labels}
        with suppress(msgspec.ValidationError):  # left out where it is read
            found = msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Service)
            self.catalog.upsert_service(found)
        self.write()

    def slice(self, number: int, more: Mapping[str, Any]) -> None:
        labels = {"kubernetes.io/service-name": f"s{number}"}
        metadata = {"name": f"s{number}-1", "namespace": "shop", "labels": labels}
        with suppress(msgspec.ValidationError):
            self.catalog.upsert_slice(msgspec.convert({"metadata": metadata, **more}, EndpointSlice))
        self.write()

    def remove(self, number: int) -> None:
        name = ServiceName("shop", f"s{number}")
        self.catalog.delete_service(name)
        self.write()
        self.catalog.delete_slice(name, f"s{number}-1")
        self.write()


steps = st.lists(
    st.tuples(st.integers(0, 3), specs, ingress | st.just({}), own_notes, texts, slices),
    min_size=1,
    max_size=6,
)


@bounded(300)
@given(steps)
def test_any_service_is_served_or_left_out_and_leaves_nothing(script: list[Any]) -> None:
    agent = Agent()
    for number, spec, status, notes, labels, slice_ in script:
        agent.slice(number, slice_)
        agent.service(number, spec, status, notes, labels)
    for number in range(4):
        agent.remove(number)
    assert (agent.maps, agent.served.all()) == ({}, [])
