"""What is particular about the built-in kinds a network plugin works with.

Gives: STRATEGIES.
"""

from __future__ import annotations

from tests.support.apiserver.crds import CRDS, DefinitionStrategy
from tests.support.apiserver.errors import Resource
from tests.support.apiserver.kinds import Strategy
from tests.support.apiserver.strategies.events import CoreEvents, Events
from tests.support.apiserver.strategies.networkpolicies import NetworkPolicies
from tests.support.apiserver.strategies.nodes import Nodes
from tests.support.apiserver.strategies.pods import Pods
from tests.support.apiserver.strategies.services import Services
from tests.support.apiserver.strategies.simple import (
    ConfigMaps,
    Endpoints,
    EndpointSlices,
    Leases,
    Namespaces,
    Roles,
    Secrets,
    ServiceAccounts,
)

RBAC = "rbac.authorization.k8s.io"
STRATEGIES: dict[Resource, Strategy] = {
    Resource("", "pods"): Pods(),
    Resource("", "nodes"): Nodes(),
    Resource("", "namespaces"): Namespaces(),
    Resource("", "services"): Services(),
    Resource("", "configmaps"): ConfigMaps(),
    Resource("", "secrets"): Secrets(),
    Resource("", "serviceaccounts"): ServiceAccounts(),
    Resource("", "endpoints"): Endpoints(),
    Resource("", "events"): CoreEvents(),
    Resource("events.k8s.io", "events"): Events(),
    Resource("discovery.k8s.io", "endpointslices"): EndpointSlices(),
    Resource("coordination.k8s.io", "leases"): Leases(),
    Resource("networking.k8s.io", "networkpolicies"): NetworkPolicies(),
    **{
        Resource(RBAC, one): Roles()
        for one in ("roles", "clusterroles", "rolebindings", "clusterrolebindings")
    },
    CRDS: DefinitionStrategy(),
}
