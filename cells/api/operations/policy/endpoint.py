"""The policy of an endpoint in Cilium's words: what is enforced, for whom, by which rules.

Needs: EndpointPolicies, PolicyView where rules are known, ProxyStatistics where there are proxies.
Gives: EndpointPolicyModels.
Source: Cilium 1.17, pkg/endpoint/api.go, pkg/policy/l4.go: L4Filter as JSON in a text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cells.api.models import v1 as models
from cells.api.operations.node.node_status import NodeStatus
from cells.endpoint import Endpoint
from cells.policy.control import PolicyView, PortUse
from cells.policy.maps import (
    EndpointPolicies,
    EndpointPolicy,
    PolicyEntries,
    RealizedPolicy,
    enforced_directions,
)
from cells.proxy.statistics import Messages, ProxyStatistics, Redirect, Statistics


class EndpointPolicyModels:
    """Makes the models of endpoints' policies."""

    def __init__(
        self,
        policies: EndpointPolicies,
        view: PolicyView | None,
        facts: NodeStatus,
        statistics: ProxyStatistics | None,
    ) -> None:
        self._facts = facts
        self._policies = policies
        self._view = view
        self._statistics = statistics

    def of(self, endpoint: Endpoint) -> models.EndpointPolicyStatus:
        """What should be enforced, and what its policy map enforces.

        While a map lags behind its rules, what the former rules said is not told again.
        """
        wanted = self._policies.table.get(endpoint.id)
        realized = self._policies.status(endpoint.id)
        written = self._policies.written(endpoint.id)
        l4 = self._l4(endpoint.id)
        spec = self._model(endpoint, wanted, l4) if wanted is not None else models.EndpointPolicy()
        real = models.EndpointPolicy(
            id=endpoint.identity,
            policy_revision=realized.revision,
            policy_enabled=self._enforced(realized),
        )
        if written is not None:
            follows = wanted is not None and written.revision == wanted.revision
            same = written is wanted
            real = spec if same else self._model(endpoint, written, l4 if follows else models.L4Policy())
        return models.EndpointPolicyStatus(
            spec=spec,
            realized=real,
            proxy_policy_revision=realized.revision,
            proxy_statistics=self.proxied(endpoint.id),
        )

    def proxied(self, endpoint_id: int) -> list[models.ProxyStatistics]:
        """What passed proxies for it, by port."""
        if self._statistics is None:
            return []
        found = self._statistics.of(endpoint_id)
        return [_proxied(redirect, found[redirect]) for redirect in sorted(found)]

    def _model(
        self, endpoint: Endpoint, policy: EndpointPolicy, l4: models.L4Policy
    ) -> models.EndpointPolicy:
        identities = _identities(policy.entries)
        return models.EndpointPolicy(
            id=endpoint.identity,
            policy_revision=policy.revision,
            policy_enabled=self._enforced(policy),
            build=policy.revision,
            allowed_ingress_identities=sorted(identities[False, False]),
            denied_ingress_identities=sorted(identities[False, True]),
            allowed_egress_identities=sorted(identities[True, False]),
            denied_egress_identities=sorted(identities[True, True]),
            l4=l4,
        )

    def _enforced(self, policy: EndpointPolicy | RealizedPolicy) -> str:
        return enforced_directions(policy, audited=self._facts.audited())

    def _l4(self, endpoint_id: int) -> models.L4Policy:
        if self._view is None:
            return models.L4Policy()
        return models.L4Policy(
            ingress=[_port_rule(one) for one in self._view.ports(endpoint_id, "ingress")],
            egress=[_port_rule(one) for one in self._view.ports(endpoint_id, "egress")],
        )


def _proxied(redirect: Redirect, statistics: Statistics) -> models.ProxyStatistics:
    return models.ProxyStatistics(
        protocol=redirect.protocol,
        port=redirect.port,
        location="ingress" if redirect.ingress else "egress",
        allocated_proxy_port=redirect.proxy_port,
        statistics=models.RequestResponseStatistics(
            requests=_messages(statistics.requests), responses=_messages(statistics.responses)
        ),
    )


def _messages(messages: Messages) -> models.MessageForwardingStatistics:
    return models.MessageForwardingStatistics(
        messages.received, messages.forwarded, messages.denied, messages.error
    )


def _identities(entries: PolicyEntries) -> dict[tuple[bool, bool], list[int]]:
    """Those of entries without protocol and port, 0 for everybody; by whether of egress, whether denied."""
    found: dict[tuple[bool, bool], list[int]] = {
        (egress, deny): [] for egress in (False, True) for deny in (False, True)
    }
    for key, entry in entries.items():
        if not key.protocol and not key.port:
            found[key.egress, entry.deny].append(key.identity)
    return found


def _port_rule(use: PortUse) -> models.PolicyRule:
    filter_: dict[str, Any] = {"port": use.port}
    if use.port_name:
        filter_["port-name"] = use.port_name
    filter_["protocol"] = use.protocol
    filter_["l7-rules"] = [{selector: how} for selector, how in use.says.items()]
    derived = sorted({labels for found in use.origins.values() for labels in found})
    return models.PolicyRule(
        rule=msgspec.json.encode(filter_).decode().replace("&", "\\u0026"),  # as encoding/json escapes it
        derived_from_rules=[list(labels) for labels in derived],
        rules_by_selector={
            selector: [list(labels) for labels in found] for selector, found in use.origins.items()
        },
    )
