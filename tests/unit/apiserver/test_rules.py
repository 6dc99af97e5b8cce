"""Values absent from recordings are accepted or rejected by the rules of their fields."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Obj, StatusError
from tests.support.examples import scaled
from tests.unit.apiserver.objects import MERGE, PODS, SERVICES, SLICES, Caller, pod
from tests.unit.apiserver.replay import scenarios

NODES = "/api/v1/nodes"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WIDGETS = f"{DEFINITIONS}/widgets.example.com"

pytestmark = pytest.mark.anyio

numbers = st.one_of(st.sampled_from([0, 1, 29999, 30000, 32767, 32768, 65535, 65536]), st.integers(-9, 70000))
addresses = st.one_of(st.ip_addresses().map(str), st.text("0123456789abcdef.:/%", min_size=1, max_size=20))


@pytest.fixture
async def ask() -> AsyncIterator[Caller]:
    async with ApiServer().serving() as url:
        yield Caller(url)


def service(*ports: Obj, **spec: Any) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a"},
        "spec": {"ports": list(ports) or [{"port": 80}], **spec},
    }


def problem(obj: Obj) -> str:
    """What a server of its own refuses in an object; nothing when it takes it."""
    try:
        ApiServer().add(obj)
    except StatusError as error:
        return " ".join(one["field"] for one in error.body["details"]["causes"])
    return ""


def valid(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return "%" not in address


def added(obj: Obj) -> str:
    async def run() -> str:
        return problem(obj)

    return asyncio.run(run())


@settings(max_examples=scaled(40), deadline=None)
@given(number=numbers)
def test_a_port_is_a_number_of_sixteen_bits(number: int) -> None:
    good = 1 <= number <= 65535
    assert (added(service({"port": number, "targetPort": 1})) == "") is good
    # Zero is what is not set there.
    assert (added(service({"port": 1, "targetPort": number})) == "") is (good or number == 0)
    ports = [{"containerPort": number}]
    container = {"name": "c", "image": "x", "ports": ports}
    probed = {"name": "c", "image": "x", "livenessProbe": {"tcpSocket": {"port": number}}}
    for one in (container, probed):
        made = {"apiVersion": "v1", "kind": "Pod", **pod("a", containers=[one])}
        assert (added(made) == "") is good


@settings(max_examples=scaled(40), deadline=None)
@given(number=numbers)
def test_a_node_port_comes_from_its_range(number: int) -> None:
    taken = added(service({"port": 1, "nodePort": number}, type="NodePort"))
    assert (taken == "") is (number == 0 or 30000 <= number <= 32767)


@settings(max_examples=scaled(60), deadline=None)
@given(address=addresses)
def test_invalid_addresses_are_refused(address: str) -> None:
    host = {"apiVersion": "v1", "kind": "Pod", **pod("a", hostAliases=[{"ip": address}])}
    assert (added(host) == "") is valid(address)
    inside = valid(address) and any(
        ipaddress.ip_address(address) in ipaddress.ip_network(one)
        for one in ("10.96.0.0/16", "fd00:10:96::/112")
    )
    assert (added(service(clusterIP=address)) == "") is (inside and address != "10.96.0.1")


CREATED = [
    (step["request"]["path"], json.dumps(step["request"]["body"]))
    for scenario in scenarios()
    for step in scenario.steps
    if step.get("request", {}).get("method") == "POST"
    and (step.get("response") or {}).get("status") == 201
    and isinstance(step["request"].get("body"), dict)
    and "<" not in (text := json.dumps(step["request"]["body"]))
    and "$elided" not in text
]
"""What a real server has taken: the paths and the bodies."""
PORTS = {"port", "targetPort", "containerPort", "hostPort", "nodePort"}
ADDRESSES = {"clusterIP", "clusterIPs", "externalIPs", "addresses", "ip", "hostIP"}
KINDS = ("/services", "/pods", "/endpointslices", "/endpoints", "/networkpolicies")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body the numbers of ports and the texts of addresses stand."""
    name = next((one for one in reversed(at) if isinstance(one, str)), "")
    if isinstance(value, (dict, list)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, key))
    elif (name in PORTS and isinstance(value, int)) or (name in ADDRESSES and isinstance(value, str)):
        yield at


VARIED = [
    (path, text, place)
    for path, text in CREATED
    if path.endswith(KINDS)
    for place in places(json.loads(text))
    # Kubernetes does not check the ports of slices, and FQDNs are addresses of some.
    if not (path.endswith("/endpointslices") and (place[0] == "ports" or '"FQDN"' in text))
]


async def refused_fields(path: str, body: Obj) -> set[str]:
    """The fields for which a server of its own refuses to make an object; none when it is made."""
    async with ApiServer().serving() as url:
        ask = Caller(url)
        await ask("POST", "/api/v1/namespaces", {"metadata": {"name": path.split("/")[-2]}})
        answer = await ask("POST", path, body)
    assert answer.status in {201, 422}, answer.body
    return {one["field"] for one in answer.json.get("details", {}).get("causes") or ()}


@settings(max_examples=scaled(80), deadline=None)
@given(data=st.data())
def test_no_recorded_object_is_taken_with_a_port_or_an_address_out_of_range(data: st.DataObject) -> None:
    path, text, place = data.draw(st.sampled_from(VARIED))
    body = json.loads(text)
    inside = body
    for one in place[:-1]:
        inside = inside[one]
    if isinstance(inside[place[-1]], int):
        wrong: Any = data.draw(st.one_of(st.integers(-(2**31), -1), st.integers(65536, 2**31 - 1)))
    else:
        wrong = data.draw(
            st.from_regex(
                r"(25[6-9]|[3-9]\d\d)(\.\d{1,3}){3}|[g-z]{2,9}|10\.0\.0|[0-9a-f:]{2,5}/8", fullmatch=True
            )
        )
    inside[place[-1]] = wrong
    shown = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place)[1:]
    named = {shown, shown.rpartition("[")[0], f"{shown}s[0]"}  # clusterIP is the first of clusterIPs
    refused = asyncio.run(refused_fields(path, body))
    assert named & refused, f"{path}: {shown}={wrong!r}: refused {refused}"


async def test_slices_and_nodes_may_name_ports_and_addresses_that_kubernetes_does_not_check(
    ask: Caller,
) -> None:
    made = {"metadata": {"name": "a"}, "addressType": "IPv4", "endpoints": [], "ports": [{"port": 65536}]}
    assert (await ask("POST", SLICES, made)).status == 201
    held = [{"addresses": ["10.0.0.256"]}]
    refused = await ask("PATCH", f"{SLICES}/a", {"endpoints": held}, MERGE)
    assert (refused.status, refused.json["details"]["causes"][0]["field"]) == (
        422,
        "endpoints[0].addresses[0]",
    )
    assert (await ask("POST", NODES, {"metadata": {"name": "n"}})).status == 201
    again = {"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}] * 2}}
    assert (await ask("PATCH", f"{NODES}/n/status", again, MERGE)).status == 422
    assert (await ask("PATCH", f"{NODES}/n", {"spec": {"podCIDR": "10.0.0.0/33"}}, MERGE)).status == 422


@pytest.mark.parametrize("field", ["podIPs", "hostIPs"])
async def test_the_status_of_a_pod_holds_addresses(ask: Caller, field: str) -> None:
    await ask("POST", PODS, pod("a"))
    status = {"status": {field: [{"ip": "10.0.0.300"}], "podIP": "10.0.0.300", "hostIP": "10.0.0.300"}}
    refused = await ask("PATCH", f"{PODS}/a/status", status, MERGE)
    assert refused.status == 422
    assert f"status.{field}[0]" in [one["field"] for one in refused.json["details"]["causes"]]


async def test_the_status_of_a_service_holds_addresses(ask: Caller) -> None:
    await ask("POST", SERVICES, service(type="LoadBalancer"))
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.300"}]}}}
    assert (await ask("PATCH", f"{SERVICES}/a/status", status, MERGE)).status == 422


async def test_protocols_of_one_service_share_a_node_port_and_services_do_not(ask: Caller) -> None:
    both = [{"name": one, "port": 53, "protocol": one.upper()} for one in ("tcp", "udp")]
    asked = [{**one, "nodePort": 30053} for one in both]
    assert (await ask("POST", SERVICES, service(*asked, type="NodePort"))).status == 201
    other = service({**both[1], "nodePort": 30053}, type="NodePort")
    other["metadata"]["name"] = "b"
    assert (await ask("POST", SERVICES, other)).status == 422
    given = service(*both, type="NodePort")
    given["metadata"]["name"] = "c"
    tcp, udp = (await ask("POST", SERVICES, given)).json["spec"]["ports"]
    assert tcp["nodePort"] == udp["nodePort"]
    twice = service(
        {"name": "a", "port": 1, "nodePort": 30001},
        {"name": "b", "port": 2, "nodePort": 30001},
        type="NodePort",
    )
    twice["metadata"]["name"] = "d"
    assert (await ask("POST", SERVICES, twice)).json["details"]["causes"][0]["field"] == (
        "spec.ports[1].nodePort"
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"loadBalancerSourceRanges": ["10.0.0.0/8"]}, "spec.LoadBalancerSourceRanges"),
        ({"type": "LoadBalancer", "loadBalancerClass": "no name"}, "spec.loadBalancerClass"),
        ({"loadBalancerClass": "example.com/a"}, "spec.loadBalancerClass"),
    ],
)
async def test_load_balancer_fields_are_refused_on_other_services(spec: Obj, field: str) -> None:
    assert problem(service(**spec)) == field


async def test_ports_of_a_pod_in_the_network_of_the_node_are_those_of_the_node() -> None:
    container = {"name": "c", "image": "x", "ports": [{"containerPort": 1, "hostPort": 2}]}
    made = {"apiVersion": "v1", "kind": "Pod", **pod("a", containers=[container])}
    assert problem(made) == ""
    made["spec"]["hostNetwork"] = True
    assert problem(made) == "spec.containers[0].ports[0].containerPort"


async def test_the_class_of_a_load_balancer_stays(ask: Caller) -> None:
    await ask("POST", SERVICES, service(type="LoadBalancer", loadBalancerClass="example.com/a"))
    for change in ("example.com/b", None):
        refused = await ask("PATCH", f"{SERVICES}/a", {"spec": {"loadBalancerClass": change}}, MERGE)
        assert refused.status == 422
        assert refused.json["details"]["causes"][0]["field"] == "spec.loadBalancerClass"
    left = await ask("PATCH", f"{SERVICES}/a", {"spec": {"type": "ClusterIP"}}, MERGE)
    assert (left.status, "loadBalancerClass" in left.json["spec"]) == (200, False)


async def test_the_role_of_a_binding_stays(ask: Caller) -> None:
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "a"}
    await ask("POST", BINDINGS, {"metadata": {"name": "a"}, "roleRef": role})
    assert (await ask("PATCH", f"{BINDINGS}/a", {"roleRef": {"name": "b"}}, MERGE)).status == 422


@pytest.mark.parametrize("change", [{"kind": "Secret"}, {"apiVersion": "v2"}, {"kind": None}])
@pytest.mark.parametrize("path", [f"{PODS}/a", WIDGETS])
async def test_a_patch_makes_no_other_kind_of_an_object(ask: Caller, path: str, change: Obj) -> None:
    await ask("POST", PODS, pod("a"))
    await ask("POST", DEFINITIONS, definition())
    assert (await ask("PATCH", path, change, MERGE)).status == 422
    pointed = [{"op": "replace", "path": f"/{key}", "value": value} for key, value in change.items()]
    assert (await ask("PATCH", path, pointed, "application/json-patch+json")).status == 422


def definition(*versions: Obj) -> Obj:
    names = {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": names,
            "versions": list(versions) or [version("v1", storage=True)],
        },
    }


def version(name: str, *, storage: bool) -> Obj:
    schema = {"openAPIV3Schema": {"type": "object"}}
    return {"name": name, "served": True, "storage": storage, "schema": schema}


async def established(ask: Caller) -> None:
    await ask("POST", DEFINITIONS, definition())
    async with asyncio.timeout(10):
        while "Established" not in {  # noqa: ASYNC110  # the answer is all there is to wait for
            one["type"]
            for one in (await ask("GET", WIDGETS)).json["status"].get("conditions") or ()
            if one["status"] == "True"
        }:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scope": "Cluster"}, "spec.scope"),
        ({"group": "example.org"}, "spec.group"),
        ({"names": {"kind": "Other"}}, "spec.names.kind"),
        ({"names": {"plural": "others"}}, "spec.names.plural"),
        ({"names": {"shortNames": ["W_"]}}, "spec.names.shortNames[0]"),
        ({"versions": [version("v2", storage=True)]}, "status.storedVersions[0]"),
        ({"versions": [version("v1", storage=True), version("v1", storage=False)]}, "spec.versions"),
        ({"versions": [version("v1", storage=False)]}, "spec.versions"),
    ],
)
async def test_a_change_of_a_definition_is_refused_that_loses_its_objects(
    ask: Caller, change: Obj, field: str
) -> None:
    await established(ask)
    refused = await ask("PATCH", WIDGETS, {"spec": change}, MERGE)
    assert refused.status == 422
    assert field in [one["field"] for one in refused.json["details"]["causes"]]


async def test_a_version_that_stored_objects_is_remembered(ask: Caller) -> None:
    await established(ask)
    versions = [version("v1", storage=False), version("v2", storage=True)]
    moved = await ask("PATCH", WIDGETS, {"spec": {"versions": versions}}, MERGE)
    assert (moved.status, moved.json["status"]["storedVersions"]) == (200, ["v1", "v2"])
