"""What a Kubernetes NetworkPolicy's ``spec`` may say, as types. Source: networking.k8s.io/v1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cells.policy.rules.schema import Object


class Expression(Object, frozen=True, gc=False):
    """One entry of ``matchExpressions``; an operator that does not exist is refused with the policy."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None


class LabelSelector(Object, frozen=True, gc=False):
    """A LabelSelector."""

    match_labels: Mapping[str, str] | None = None
    match_expressions: tuple[Expression, ...] | None = None


class IPBlock(Object, frozen=True, gc=False, rename={"excepted": "except"}):
    """A prefix without some."""

    cidr: str
    excepted: tuple[str, ...] | None = None


class Peer(Object, frozen=True, gc=False):
    """Pods, namespaces, or a prefix."""

    pod_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    ip_block: IPBlock | None = None


class Port(Object, frozen=True, gc=False):
    """A port by number or name; none means every port of the protocol."""

    port: int | str | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    end_port: int | None = None


class Ingress(Object, frozen=True, gc=False, rename={"sources": "from"}):
    """Who may come, on which ports."""

    sources: tuple[Peer, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Egress(Object, frozen=True, gc=False):
    """Where to, on which ports."""

    to: tuple[Peer, ...] | None = None
    ports: tuple[Port, ...] | None = None


class NetworkPolicySpec(Object, frozen=True, gc=False):
    """Isolation of the pods it selects, and what is allowed nevertheless."""

    pod_selector: LabelSelector = LabelSelector()
    ingress: tuple[Ingress, ...] | None = None
    egress: tuple[Egress, ...] | None = None
    policy_types: tuple[Literal["Ingress", "Egress"], ...] | None = None
