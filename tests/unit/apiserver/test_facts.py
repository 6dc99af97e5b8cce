"""What a real API server does that the recordings state in words: notes of ``conformance/kubernetes``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.apiserver import ApiServer
from tests.unit.apiserver.objects import AUTH, MERGE, PODS, SERVICES, SLICES, Caller, pod
from tests.unit.apiserver.wire_client import Received, Sent, Stream, exchange, target

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
CONFIGMAPS = "/api/v1/namespaces/default/configmaps"

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def ask(server: ApiServer) -> AsyncIterator[Caller]:
    async with server.serving() as url:
        yield Caller(url)


async def test_nothing_is_made_in_a_namespace_that_ends_but_what_is_there_still_changes(ask: Caller) -> None:
    await ask("POST", "/api/v1/namespaces", {"metadata": {"name": "d"}})
    inside = "/api/v1/namespaces/d/configmaps"
    await ask("POST", inside, {"metadata": {"name": "kept", "finalizers": ["example.com/hold"]}})
    assert (await ask("DELETE", "/api/v1/namespaces/d")).json["status"]["phase"] == "Terminating"
    wanted = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}}
    answer = await ask("POST", inside, wanted)
    assert answer.status == 403
    (cause,) = answer.json["details"]["causes"]
    assert (cause["reason"], cause["field"]) == ("NamespaceTerminating", "metadata.namespace")
    assert (await ask("PATCH", f"{inside}/kept", {"data": {"a": "b"}}, MERGE)).status == 200


async def test_a_name_is_taken_while_finalizers_hold_its_object(ask: Caller) -> None:
    held = {"metadata": {"name": "a", "finalizers": ["example.com/hold"]}}
    await ask("POST", CONFIGMAPS, held)
    assert (await ask("DELETE", f"{CONFIGMAPS}/a")).json["kind"] == "ConfigMap"
    again = await ask("POST", CONFIGMAPS, {"metadata": {"name": "a"}})
    assert (again.status, again.json["reason"]) == (409, "AlreadyExists")
    assert again.json["message"] == 'object is being deleted: configmaps "a" already exists'
    await ask("PATCH", f"{CONFIGMAPS}/a", {"metadata": {"finalizers": None}}, MERGE)
    assert (await ask("POST", CONFIGMAPS, {"metadata": {"name": "a"}})).status == 201


@pytest.mark.parametrize(
    "time", ["2025-01-15T10:00:00Z", "2025-01-15T10:00:00.123Z", "2025-01-15T10:00:00.123456789Z"]
)
async def test_the_times_of_a_lease_have_six_digits_in_every_way_to_write(ask: Caller, time: str) -> None:
    lease = {"metadata": {"name": "a"}, "spec": {"renewTime": "2025-01-15T10:00:00.000000Z"}}
    assert (await ask("POST", LEASES, lease)).status == 201
    change = {"spec": {"renewTime": time}}
    pointed = [{"op": "replace", "path": "/spec/renewTime", "value": time}]
    for answer in (
        await ask("POST", LEASES, {"metadata": {"name": "b"}, **change}),
        await ask("PUT", f"{LEASES}/a", {"metadata": {"name": "a"}, **change}),
        await ask("PATCH", f"{LEASES}/a", change, MERGE),
        await ask("PATCH", f"{LEASES}/a", pointed, "application/json-patch+json"),
    ):
        assert answer.status == 400
        assert time in answer.json["message"]


async def test_the_addresses_of_a_pod_follow_its_first_one(ask: Caller) -> None:
    await ask("POST", PODS, pod("a"))

    async def status(**wanted: Any) -> Any:
        answer = await ask("PATCH", f"{PODS}/a/status", {"status": wanted}, MERGE)
        return answer.json["status"]

    alone = await status(podIPs=[{"ip": "10.0.0.1"}, {"ip": "fd00::1"}], phase="Bogus")
    assert (alone["podIP"], alone["podIPs"], alone["phase"]) == (
        "10.0.0.1",
        [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
        "Bogus",
    )
    undone = await status(podIPs=[{"ip": "10.0.0.2"}])
    assert undone["podIPs"] == [{"ip": "10.0.0.1"}]
    moved = await status(podIP="10.0.0.3")
    assert moved["podIPs"] == [{"ip": "10.0.0.3"}]


async def test_a_bound_pod_goes_in_two_steps_and_its_time_only_gets_shorter(ask: Caller) -> None:
    await ask("POST", PODS, pod("free"))
    await ask("DELETE", f"{PODS}/free")
    assert (await ask("GET", f"{PODS}/free")).status == 404
    await ask("POST", PODS, pod("bound", nodeName="node-a"))
    sent = Sent("GET", target(PODS, {"watch": 1, "fieldSelector": "metadata.name=bound"}), [AUTH])
    stream = Stream(ask.url, sent)
    await stream.started()
    for grace, left in ((20, 20), (10, 10), (50, 10)):
        answer = await ask("DELETE", f"{PODS}/bound", {"gracePeriodSeconds": grace})
        assert answer.json["metadata"]["deletionGracePeriodSeconds"] == left
    await ask("DELETE", f"{PODS}/bound", {"gracePeriodSeconds": 0})
    assert await stream.until(5)
    assert [one["type"] for one in stream.events] == ["ADDED", *["MODIFIED"] * 3, "DELETED"]
    await stream.close()


async def test_only_large_bodies_are_compressed_and_long_ones_come_in_chunks(ask: Caller) -> None:
    async def framing(letters: int) -> tuple[str | None, bool, bytes]:
        name = f"c{letters}"
        await ask("POST", CONFIGMAPS, {"metadata": {"name": name}, "data": {"d": "x" * letters}})
        sent = Sent("GET", f"{CONFIGMAPS}/{name}", [AUTH, ("Accept-Encoding", "gzip")])
        answer = await exchange(ask.url, sent)
        assert answer is not None
        assert answer.json["metadata"]["name"] == name
        return answer.headers.get("content-encoding"), "content-length" in answer.headers, answer.body[-1:]

    assert await framing(1000) == (None, True, b"\n")
    assert await framing(4000) == (None, False, b"\n")
    assert await framing(120_000) == (None, False, b"\n")
    assert (await framing(140_000))[0] == "gzip"


async def test_objects_may_be_so_large_and_no_larger(ask: Caller) -> None:
    most = 256 * 1024

    async def annotated(count: int) -> Received:
        return await ask(
            "POST", CONFIGMAPS, {"metadata": {"name": "a", "annotations": {"a": "x" * (count - 1)}}}
        )

    refused = await annotated(most + 1)
    assert refused.status == 422
    assert refused.json["details"]["causes"][0]["reason"] == "FieldValueTooLong"
    assert (await annotated(most)).status == 201
    step = {"op": "test", "path": "/metadata/name", "value": "a"}
    path, media = f"{CONFIGMAPS}/a", "application/json-patch+json"
    assert (await ask("PATCH", path, [step] * 10_000, media)).status == 200
    refused = await ask("PATCH", path, [step] * 10_001, media)
    assert (refused.status, refused.json["reason"]) == (413, "RequestEntityTooLarge")


async def test_a_slice_without_backends_has_null_endpoints(ask: Caller) -> None:
    answer = await ask("POST", SLICES, {"metadata": {"name": "a"}, "addressType": "IPv4"})
    assert (answer.json["endpoints"], answer.json["ports"]) == (None, None)
    (one,) = (await ask("GET", SLICES, fieldSelector="metadata.name=a")).json["items"]
    assert (one["endpoints"], one["ports"]) == (None, None)


async def test_what_a_manager_applies_no_more_goes_and_what_others_set_stays(ask: Caller) -> None:
    path, apply = f"{SERVICES}/a", "application/apply-patch+yaml"
    ports = [{"name": "a", "port": 1, "protocol": "TCP"}, {"name": "b", "port": 2, "protocol": "TCP"}]

    async def applied(*ports: dict[str, Any], **labels: str) -> Received:
        head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "labels": labels}}
        return await ask("PATCH", path, {**head, "spec": {"ports": list(ports)}}, apply, fieldManager="m")

    assert (await applied(*ports, x="1", y="2")).status == 201
    await ask("PATCH", path, {"metadata": {"labels": {"z": "3"}}}, MERGE)
    answer = await applied(ports[1], x="4")
    assert (answer.status, answer.json["metadata"]["labels"]) == (200, {"x": "4", "z": "3"})
    assert [one["port"] for one in answer.json["spec"]["ports"]] == [2]
