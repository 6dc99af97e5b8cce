"""Every object a real API server answered with fits the narrow definitions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from cells.kubernetes.objects import KINDS
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.core import PODS, Pod
from cells.kubernetes.objects.kind import LabelSelector, LabelSelectorRequirement
from tests.support.recordings import recordings

RECORDINGS = recordings("kubernetes")


def recorded() -> Iterator[dict[str, Any]]:
    """Every whole object in the recordings."""
    pending: list[Any] = []
    for path in sorted(RECORDINGS.glob("*.json")):
        for step in json.loads(path.read_bytes()).get("exchanges", []) if path.name != "index.json" else []:
            pending += [step.get("response"), step.get("stream")]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            metadata = value.get("metadata")
            if isinstance(value.get("kind"), str) and isinstance(metadata, dict) and "uid" in metadata:
                yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def test_recorded_objects_are_decoded_and_written_as_they_were() -> None:
    kinds = {(kind.api_version, kind.kind): kind for kind in KINDS}
    counted: Counter[str] = Counter()
    for value in recorded():
        kind = kinds.get((value.get("apiVersion", ""), value["kind"]))
        text = json.dumps(value)
        if kind is None or "$elided" in text:
            continue
        text = re.sub(r'"<NODEPORT:\d+>"', "30080", text)
        row = kind.decoder.decode(text)
        again = json.loads(msgspec.json.encode(row))
        assert contained(again, json.loads(text)) == "", value["metadata"]["name"]
        counted[kind.kind] += 1
    assert counted["Pod"] > 30
    assert counted["CiliumNode"] > 30
    assert len(counted) >= 12, counted


def contained(ours: Any, theirs: Any, at: str = "") -> str:
    """Where what we write is not what came."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key not in theirs:
                return f"{at}.{key} is not there"
            if found := contained(value, theirs[key], f"{at}.{key}"):
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return next((found for one in zip(ours, theirs, strict=True) if (found := contained(*one, at))), "")
    return "" if ours == theirs else f"{at}: {ours!r}, not {theirs!r}"


def test_a_kind_knows_its_paths() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("default", "web", "status") == "/api/v1/namespaces/default/pods/web/status"
    assert CILIUM_NODES.path("ignored", "node-a") == "/apis/cilium.io/v2/ciliumnodes/node-a"


def test_a_selector_selects_as_kubernetes_does() -> None:
    web = {"app": "web", "tier": "1"}
    assert LabelSelector().matches({})
    assert LabelSelector(match_labels={"app": "web"}).matches(web)
    assert not LabelSelector(match_labels={"app": "db"}).matches(web)
    for operator, values, wanted in (
        ("In", ("web", "db"), True),
        ("NotIn", ("web",), False),
        ("Exists", None, True),
        ("DoesNotExist", None, False),
        ("Bogus", None, False),
    ):
        selector = LabelSelector(match_expressions=(LabelSelectorRequirement("app", operator, values),))
        assert selector.matches(web) is wanted, operator


def test_the_addresses_of_a_pod_are_of_either_field() -> None:
    listed = b'"podIPs":[{"ip":"10.0.0.1"},{"ip":"fd00::1"}]'
    both = b'{"metadata":{"name":"a"},"status":{"podIP":"10.0.0.1",' + listed + b"}}"
    one = b'{"metadata":{"name":"a"},"status":{"podIP":"10.0.0.1"}}'
    assert msgspec.json.decode(both, type=Pod).addresses == ("10.0.0.1", "fd00::1")
    assert msgspec.json.decode(one, type=Pod).addresses == ("10.0.0.1",)


def test_what_we_write_of_a_node_has_the_names_of_its_definition() -> None:
    body = {
        "metadata": {"name": "a"},
        "spec": {"bootid": "b", "ipam": {"podCIDRs": ["10.0.0.0/24"], "pre-allocate": 8}},
    }
    node = msgspec.convert(body, CiliumNode)
    assert node.spec.ipam.pod_cidrs == ("10.0.0.0/24",)
    assert json.loads(msgspec.json.encode(node)) == body
