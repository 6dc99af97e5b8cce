"""Every recorded run of Cilium's service control plane yields the same frontends and maps at each step."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cells.services import Seed
from cells.services.maglev import MaglevBackend, fill
from tests.support.counts import Count
from tests.unit.services.compare import Names, canonical, differences
from tests.unit.services.replay import Json, Run, load, names

NOT_BUILT = {
    "health-check-result": "active health checks of backends are not built",
    "l7-redirect-register": "L7 load balancing is not built",
    "l7-redirect-deregister": "L7 load balancing is not built",
    "endpoints-upsert": "Endpoints are superseded by EndpointSlices",
    "endpoints-delete": "Endpoints are superseded by EndpointSlices",
    "node-addresses": "frontends of a new node address get all properties of their service",
    "node-labels": "changed node labels take effect at once, not at the next event",
}
ANNOTATIONS = "annotations of services have effect, as in the 1.17 releases"
OLDER = {
    "annotations_without_effect": ANNOTATIONS,
    "node_exposure_annotation_ignored": ANNOTATIONS,
    "global_service_only_remote": "a new slice is served at once, not at the next event of the service",
    "loadbalancer_ingress_odd": "ingress addresses with ipMode Proxy are not served, as in the 1.17 releases",
    "restore_disabled": "an earlier agent's entries are always restored: the option does not exist",
    "restore_service_without_slice": "a service without slices has no backends, as in the 1.17 releases",
}
"""Recordings of the tree before the release of 1.17, which differs from the releases and from our agent."""
WITH_PROTOCOLS = {
    "hostport_protocols": "with protocol differentiation, host ports of TCP and UDP are two frontends",
    "restore_backend_states": "backends with a protocol are new entries, without an earlier agent's zones",
}
NOT_COMPARED = (
    "proto",
    "scope",
    "annotations",
    "maglev",
    "health_check_node_port",
    "restored_backends_pending",
)
counts: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _counted(count: Count) -> Iterator[None]:
    counts.clear()
    yield
    count("recordings of services", counts)


def exclusion(recording: Json) -> str | None:
    """Why a recording cannot have the recorded outcome, by what happens in it."""
    if "random-upstream" in recording.get("tags", ()):
        return "the recorded result is one of several possible ones"
    if (reason := OLDER.get(recording["name"].rpartition("/")[2])) is not None:
        return reason
    found = (reason for run in recording["agent_runs"] for reason in _exclusions(run))
    return next(found, None)


def _exclusions(run: Json) -> Iterator[str]:
    services: dict[str, Json] = {}
    if run.get("k8s_enabled") is False:
        yield "without a source of objects the API accepts no services"
    for entry in run.get("maps_before", ()):
        if entry["k"].get("proto"):
            yield "protocols of restored frontends are kept"
        if "source_range" in entry["map"]:
            services["web"] = {"loadBalancerSourceRanges": ["restored"]}
    for step in run["steps"]:
        if {"api-put-service", "http-get"} <= {event["op"] for event in step["events"]}:
            yield "health check ports follow the backends' states at once"
        for event in step["events"]:
            if reason := NOT_BUILT.get(event["op"]) or _changed_object(event, services):
                yield reason


def _changed_object(event: Json, services: dict[str, Json]) -> str | None:
    if event["op"] == "pod-upsert":
        services["pods"] = event["object"]
    if event["op"] != "service-upsert":
        return None
    spec, name = event["object"]["spec"], event["object"]["metadata"]["name"]
    before = services.get(name)
    services[name] = spec
    ranges = spec.get("loadBalancerSourceRanges") or ()
    for reason, holds in (
        (
            "a host port is served again once no service claims its address",
            "pods" in services and spec.get("externalIPs"),
        ),
        ("an invalid source range is ignored", any("/" not in one for one in ranges)),
        (
            "a health check port is closed when the policy is no longer Local",
            spec.get("healthCheckNodePort") and spec.get("externalTrafficPolicy") != "Local",
        ),
        (
            "a service that becomes an ExternalName is no longer served",
            before is not None and before.get("type") != "ExternalName" == spec.get("type"),
        ),
        (
            "removed source ranges take effect at once, not at the next event",
            before is not None and before.get("loadBalancerSourceRanges") and not ranges,
        ),
    ):
        if holds:
            return reason
    return None


def seen(state: Json) -> Json:
    """The parts of a recorded state that are compared."""
    frontends = [
        {key: value for key, value in one.items() if key not in NOT_COMPARED}
        | {
            "backends": [
                {key: value for key, value in backend.items() if key not in ("proto", "zone_id")}
                for backend in one["backends"]
                if backend
            ]
        }
        for one in state["frontends"]
    ]
    return state | {"frontends": frontends}


def compare(recorded: Json, run: Run, theirs: Names, ours: Names) -> None:
    state, own = seen(recorded), run.state()
    theirs.learn(state)
    if not run.synced:
        counts["not: agents write nothing before all objects are known"] += 1
        return
    if any(one.get("restored_unconfirmed") for one in recorded["frontends"]):
        counts["not: a deleted service is removed before other clusters are known"] += 1
        return
    ours.learn(own)
    assert differences(known(canonical(state, theirs)), known(canonical(own, ours))) == []
    counts["states"] += 1
    if "api_services" in recorded:
        assert sorted(map(listed, run.api())) == sorted(map(listed, recorded["api_services"]))
        counts["answers of GET /service"] += 1


def listed(spec: Json) -> str:
    """What is compared of a service in the API: not its number, its backends' order, and protocols."""
    seen = {
        "frontend": {key: value for key, value in spec["frontend-address"].items() if key != "protocol"},
        "backends": sorted(
            json.dumps({key: value for key, value in one.items() if key != "protocol"}, sort_keys=True)
            for one in spec.get("backend-addresses") or ()
        ),
        "flags": spec["flags"],
    }
    return json.dumps(seen, sort_keys=True)


def known(state: dict[str, Any]) -> dict[str, Any]:
    """Without translations of frontends that are not there: upstream never removes those."""
    maps = {
        name: {key: value for key, value in entries.items() if key != (None, None)}
        if name.endswith("reverse_nat")
        else entries
        for name, entries in state["maps"].items()
    }
    return state | {"maps": {name: entries for name, entries in maps.items() if entries}}


@pytest.mark.parametrize("name", names("model"))
@pytest.mark.parametrize("protocols", [True, False])
def test_a_recorded_service_model_is_reproduced(name: str, protocols: bool) -> None:
    """As agents are by default, and with bpf-lb-proto-diff=false, as the recorded tree was."""
    replay(load(name), protocols=protocols)


@pytest.mark.parametrize("name", names("restore"))
@pytest.mark.parametrize("protocols", [True, False])
def test_a_recorded_restart_with_services_is_reproduced(name: str, protocols: bool) -> None:
    """The recorded maps have no protocols; agents, which distinguish them by default, take them over."""
    replay(load(name), protocols=protocols)


def replay(recording: Json, *, protocols: bool = False) -> None:
    reason = exclusion(recording)
    name = recording["name"].rpartition("/")[2]
    if protocols:
        reason = reason or WITH_PROTOCOLS.get(name)
    if reason is not None:
        counts[f"not: {reason}"] += 1
        return
    counts["replayed"] += 1
    maps: dict[str, dict[str, str]] = {}
    for recorded in recording["agent_runs"]:
        for entry in recorded.get("maps_before", ()):
            maps.setdefault(entry["map"], {})[entry["key"]] = entry["value"]
        run, theirs, ours = Run(recorded, maps, protocols=protocols), Names(), Names()
        if "expect_after_restore" in recorded:
            compare(recorded["expect_after_restore"], run, theirs, ours)
        for step in recorded["steps"]:
            run.results.clear()
            for event in step["events"]:
                run.handle(event)
            if "expect" in step:
                compare(step["expect"], run, theirs, ours)
                if run.synced:
                    compare_answers(step["expect"].get("results") or [], run.results)


def compare_answers(recorded: list[Json], own: list[Json]) -> None:
    """Of the API, and of health check ports; no answer without a listener."""
    asked = [one for one in recorded if one["op"] in {"http-get", "api-put-service", "api-delete-service"}]
    assert len(asked) == len(own)
    for theirs, ours in zip(asked, own, strict=True):
        assert (theirs.get("status"), without_form(theirs.get("body", ""))) == (
            (ours["status"], ours["body"]) if ours is not None else (None, "")
        )
        if ours is not None and "headers" in theirs:
            assert ours["headers"].items() <= theirs["headers"].items()
        counts["answers"] += 1


def without_form(body: str) -> str:
    """Upstream writes a frontend in Go's form of a struct in one text."""
    return re.sub(r"\{\{(\S+) \{NONE (\d+)\} 0\} \d+\}", r"\1:\2", body)


@pytest.mark.parametrize("case", load("maglev")["cases"], ids=lambda case: str(case["description"]))
def test_a_recorded_maglev_table_is_reproduced(case: Any) -> None:
    backends = case["backends"]
    if isinstance(backends, dict):
        backends = [
            (f"[10.244.{i // 250}.{i % 250 + 1}:8080,State:active]", i + 1, 100)
            for i in range(case["n_backends"])
        ]
    seed = Seed.parse(case["seed"])
    table = fill([MaglevBackend(*one) for one in backends], case["table_size"], seed.names)
    assert hashlib.sha256(table).hexdigest() == case["expect"]["table_sha256"]
    assert [seed.ipv4, seed.ipv6] == case["expect"]["jhash_seeds"]


@pytest.mark.parametrize("case", load("maglev")["invalid_seeds"], ids=lambda case: str(case["seed"]))
def test_an_invalid_maglev_seed_is_refused(case: Any) -> None:
    with pytest.raises(ValueError, match=r"base64|bytes"):
        Seed.parse(case["seed"])
