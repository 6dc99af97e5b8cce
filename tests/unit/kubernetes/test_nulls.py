"""A null field counts as an absent one: in every kind, at every depth, from any source."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from cells.kubernetes.manifest_parser import ManifestProblem, parse
from cells.kubernetes.objects import KINDS
from cells.kubernetes.objects.core import NAMESPACES, NETWORK_POLICIES, SERVICES
from cells.kubernetes.objects.kind import Kind
from cells.policy.rules import PolicyOptions
from cells.policy.rules.peers import TranslationContext
from cells.policy.rules.translate import translate

Path = tuple[str | int, ...]


PLAIN: tuple[tuple[type[inspect.Type], Any], ...] = (
    (inspect.BoolType, True),
    (inspect.IntType, 7),
    (inspect.StrType, "x"),
    (inspect.AnyType, {"y": "z"}),
)


WORDS = {
    "type": "ClusterIP",
    "sessionAffinity": "ClientIP",
    "externalTrafficPolicy": "Local",
    "internalTrafficPolicy": "Local",
    "protocol": "TCP",
    "addressType": "IPv4",
}
"""Fields of services and slices that take certain words only; others with these names take any."""


def example(of: inspect.Type) -> Any:
    """A value of this type with something in every field."""
    if isinstance(of, inspect.UnionType):
        return example(next(one for one in of.types if not isinstance(one, inspect.NoneType)))
    if isinstance(of, inspect.StructType):
        return {one.encode_name: WORDS.get(one.encode_name) or example(one.type) for one in of.fields}
    if isinstance(of, inspect.DictType):
        return {"a": example(of.value_type)}
    if isinstance(of, (inspect.ListType, inspect.VarTupleType)):
        return [example(of.item_type)]
    if isinstance(of, inspect.LiteralType):
        return of.values[0]
    return next(value for kind, value in PLAIN if isinstance(of, kind))


def fields(of: inspect.Type, at: Path = ()) -> Iterator[tuple[Path, bool]]:
    """The way to every field of a struct, and whether it has to be there."""
    if isinstance(of, inspect.UnionType):
        for one in of.types:
            yield from fields(one, at)
    elif isinstance(of, inspect.StructType):
        for field in of.fields:
            way = (*at, field.encode_name)
            yield way, field.required
            yield from fields(field.type, way)
    elif isinstance(of, inspect.DictType):
        yield from fields(of.value_type, (*at, "a"))
    elif isinstance(of, (inspect.ListType, inspect.VarTupleType)):
        yield from fields(of.item_type, (*at, 0))


def whole(kind: Kind[Any]) -> dict[str, Any]:
    value: dict[str, Any] = example(inspect.type_info(kind.struct))
    return {"apiVersion": kind.api_version, "kind": kind.kind, **value}


def put(value: Any, way: Path, *, null: bool) -> dict[str, Any]:
    """The same with null in this field, or without the field."""
    made = copy.deepcopy(value)
    inner = made
    for step in way[:-1]:
        inner = inner[step]
    if null:
        inner[way[-1]] = None
    else:
        del inner[way[-1]]
    return made  # type: ignore[no-any-return]


def from_manifest(value: dict[str, Any]) -> Any:
    (one,) = parse(json.dumps(value).encode()).objects
    return one.row


def outcome(value: dict[str, Any]) -> Any:
    """The row, or why it is refused, without the place."""
    try:
        return from_manifest(value)
    except ManifestProblem as problem:
        return str(problem).split(": ", 1)[1]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_null_means_absent(kind: Kind[Any]) -> None:
    value, count = whole(kind), 0
    for way, required in fields(inspect.type_info(kind.struct)):
        null, absent = put(value, way, null=True), put(value, way, null=False)
        text = json.dumps(null).encode()
        if required:
            with pytest.raises(msgspec.ValidationError, match=f"missing required field `{way[-1]}`"):
                kind.decode(text)
            with pytest.raises(ManifestProblem, match=f"(?=.*missing).*{way[-1]}"):
                from_manifest(null)
        else:
            assert kind.decode(text) == kind.decode(json.dumps(absent).encode()), way
            if way != ("metadata", "name"):
                assert outcome(null) == outcome(absent), way
        count += 1
    assert count >= 8


def test_everything_may_be_null_at_once() -> None:
    spec = dict.fromkeys(("type", "ports", "clusterIP", "sessionAffinity", "healthCheckNodePort"))
    body = {"metadata": {"name": "a", "labels": None, "namespace": "x"}, "spec": spec, "status": None}
    assert SERVICES.convert(body) == SERVICES.convert({"metadata": {"name": "a", "namespace": "x"}})


def test_a_label_that_is_null_is_empty() -> None:
    text = b'{"metadata":{"name":"a","labels":{"one":null,"two":"2"},"annotations":{"x":null}}}'
    assert NAMESPACES.decode(text).labels == {"one": "", "two": "2"}
    assert NAMESPACES.decode(text).annotations == {"x": ""}


def test_a_null_in_a_list_is_refused_with_its_place() -> None:
    text = b"apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  externalIPs:\n  - ~\n"
    with pytest.raises(
        ManifestProblem, match=r"6:5: Service a: spec.externalIPs\[0\]: expected `str`, got `null`"
    ):
        parse(text)


def test_what_kubectl_makes_is_read() -> None:
    text = b"""\
apiVersion: v1
kind: Service
metadata:
  creationTimestamp: null
  labels: {app: web}
  name: web
spec:
  ports:
  - {name: 80-80, port: 80, protocol: TCP, targetPort: 80, nodePort: null}
  selector: {app: web}
  type: ClusterIP
status:
  loadBalancer: null
---
apiVersion: v1
kind: Pod
metadata: {creationTimestamp: null, name: web}
spec:
  containers: [{image: nginx, name: web, resources: {}, ports: null}]
  dnsPolicy: ClusterFirst
  nodeName: null
status: null
"""
    assert [(one.kind.kind, one.key) for one in parse(text).objects] == [
        ("Service", ("default", "web")),
        ("Pod", ("default", "web")),
    ]


NETWORK_POLICY = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "a", "namespace": "x"},
}
CILIUM_POLICY = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "a", "namespace": "x"},
}


@pytest.mark.parametrize(
    ("with_nulls", "without"),
    [
        (
            {**NETWORK_POLICY, "spec": {"podSelector": None, "ingress": None, "policyTypes": ["Ingress"]}},
            {**NETWORK_POLICY, "spec": {"policyTypes": ["Ingress"]}},
        ),
        (
            {
                **NETWORK_POLICY,
                "spec": {
                    "podSelector": {"matchLabels": None},
                    "ingress": [{"from": None, "ports": [{"port": 80, "protocol": None, "endPort": None}]}],
                },
            },
            {**NETWORK_POLICY, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]}},
        ),
        (
            {
                **CILIUM_POLICY,
                "spec": {
                    "endpointSelector": {"matchLabels": {"app": "web"}, "matchExpressions": None},
                    "description": None,
                    "egress": None,
                    "ingress": [
                        {
                            "fromEndpoints": None,
                            "fromEntities": ["all"],
                            "toPorts": [{"ports": [{"port": "80", "protocol": None, "endPort": None}]}],
                        }
                    ],
                },
            },
            {
                **CILIUM_POLICY,
                "spec": {
                    "endpointSelector": {"matchLabels": {"app": "web"}},
                    "ingress": [{"fromEntities": ["all"], "toPorts": [{"ports": [{"port": "80"}]}]}],
                },
            },
        ),
    ],
)
def test_null_fields_of_policies_mean_absent(with_nulls: dict[str, Any], without: dict[str, Any]) -> None:
    world = TranslationContext(PolicyOptions())
    assert translate(with_nulls, world) == translate(without, world)


def test_null_fields_of_a_policy_stay_until_translation() -> None:
    value = {**NETWORK_POLICY, "spec": {"podSelector": None}}
    assert NETWORK_POLICIES.convert(value).spec == {"podSelector": None}
