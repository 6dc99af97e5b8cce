"""Computes the policies of endpoints from policy objects.

Controller: reads policy objects, CIDR groups, identities and named ports; writes rows of
``endpoint-policies`` and claims of prefixes in the ipcache.

Why: policy objects may be added, changed and deleted at any time. If a new version of an object is rejected,
the previous version stays in force.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from cells.base.metrics import Collector, MetricFamily, features
from cells.cluster.nodes.parse import RulePeers
from cells.config import AgentConfig
from cells.kubernetes.settings import ObjectSource
from cells.policy import Localhost
from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.policies import NamedPodPort
from cells.policy.control.computer import RulePolicy
from cells.policy.control.http_redirects import (
    DNSProxyPort,
    HTTPProxyPorts,
    HTTPProxyState,
    HTTPRedirect,
    HTTPRedirects,
    http_proxy,
    http_redirects,
)
from cells.policy.control.names import (
    NamedAddresses,
    NameFilter,
    NameRules,
    PodNetworks,
    PolicyPrefixes,
    name_matches,
)
from cells.policy.control.objects import (
    ClusterServices,
    L7Proxy,
    L7ProxySettings,
    PodPorts,
    PolicyObject,
    PolicyRuleSettings,
    RuleSettings,
    RuleSources,
    l7_proxy,
    of_pod,
    of_remote,
    policy_events,
    policy_objects,
)
from cells.policy.control.view import PolicyCounts, PolicyView, PortUse, SelectorUse
from cells.policy.control.watch import PeerWatch, PolicyRollout, PolicyStatuses, PolicyWatch
from cells.policy.explain import (
    End,
    Explained,
    ExplainedConnection,
    ExplainedDirection,
    NearRule,
    Target,
    UnanswerableError,
    explained,
)
from cells.policy.explain.directory import (
    BackendForClient,
    RequestedPort,
    ServedPort,
    headless,
    parse_port,
    refusal,
    source_of,
    targets_of,
)
from cells.policy.labels import LabelSet, canonical_name
from cells.policy.maps import KnownRules, NodePolicy, RuleComputer
from cells.policy.rules import PROTOCOLS, SUPPORTED, Direction, PolicyOptions
from cells.policy.rules.peers import Services
from cells.policy.rules.schema import HTTPRule
from lifecycle import Member, after, config, group, invoke, module, provide, provide_private

__all__ = [
    "PROTOCOLS",
    "BackendForClient",
    "DNSProxyPort",
    "Direction",
    "DirectionPolicy",
    "End",
    "Explained",
    "ExplainedConnection",
    "ExplainedDirection",
    "HTTPProxyPorts",
    "HTTPProxyState",
    "HTTPRedirect",
    "HTTPRule",
    "L7Proxy",
    "LabelSet",
    "NameFilter",
    "NameRules",
    "NamedAddresses",
    "NamedPodPort",
    "NearRule",
    "PodNetworks",
    "PolicyObject",
    "PolicyView",
    "PolicyWatch",
    "PortUse",
    "RequestedPort",
    "RulePolicy",
    "SelectorUse",
    "ServedPort",
    "Target",
    "UnanswerableError",
    "canonical_name",
    "cell",
    "explained",
    "headless",
    "name_matches",
    "of_pod",
    "of_remote",
    "parse_port",
    "refusal",
    "source_of",
    "targets_of",
]


def policy_options(
    agent: AgentConfig,
    policy: NodePolicy,
    source: ObjectSource,
    rules: RuleSettings,
    l7: L7Proxy,
    proxy: DNSProxyPort | None,
    peers: RulePeers | None,
) -> PolicyOptions:
    """Return the policy options from the agent's settings."""
    names = proxy is not None and l7.enabled
    localhost = policy.localhost is Localhost.ALWAYS or (
        policy.localhost is Localhost.AUTO and source is not ObjectSource.NOWHERE
    )
    return replace(
        SUPPORTED,
        cluster_name=agent.cluster_name,
        enable_ipv4=agent.ipv4,
        enable_ipv6=agent.ipv6,
        enable_policy=policy.enforcement.value,
        enforces_init=source is not ObjectSource.NOWHERE,
        allow_localhost="always" if localhost else "policy",
        enable_host_firewall=policy.host_firewall,
        enable_icmp_rules=rules.enable_icmp_rules,
        enable_non_default_deny_policies=rules.enable_non_default_deny_policies,
        enable_node_selector_labels=peers is not None and peers.nodes_by_labels,
        enable_l7_proxy=names,
        has_dns_proxy=names,
        cidr_matches_pods=peers is not None and peers.pods_by_cidr,
    )


@after(PolicyWatch, PeerWatch)
def known_rules(sources: RuleSources) -> KnownRules:
    """Return whether rules are processed, so that they may replace the previous run's policies."""
    return sources


def rule_metrics(policy: RulePolicy, counts: PolicyCounts) -> Member[Collector]:
    """Return the collector of policy metrics."""

    async def collect() -> Iterable[MetricFamily]:
        from cells.policy.control.view import families

        return families(policy, counts)

    return Collector("policy-rules", collect)


def rule_features(options: PolicyOptions) -> Member[Collector]:
    """Return the collector of optional features of rules."""
    return features(
        "policy-features",
        lambda: {
            "network_policies_host_firewall_enabled": options.enable_host_firewall,
            "network_policies_non_defaultdeny_policies_enabled": options.enable_non_default_deny_policies,
        },
    )


cell = group(
    module("policy-settings", "Settings of L7 proxies", config(L7ProxySettings), provide(l7_proxy)),
    module(
        "policy-computer",
        "Computation of endpoint policies from the rules in force",
        config(RuleSettings),
        provide(RulePolicy, as_=(RuleComputer,)),  # replaces the default, which only has the enforcement mode
        provide(policy_options, rule_features, http_redirects, http_proxy),
        provide_private(ClusterServices, as_=(Services,)),
        provide_private(HTTPRedirects),
        provide(PodPorts, RuleSources),
    ),
    module(
        "policy-rules",
        "Policy objects: rules, statuses and prefixes",
        config(PolicyRuleSettings),
        provide(PolicyWatch, PeerWatch, known_rules),
        provide_private(PolicyPrefixes, PolicyStatuses, PolicyRollout),
        provide(policy_objects, policy_events, PolicyView),
        provide(NamedAddresses, PodNetworks, PolicyCounts, rule_metrics),
        invoke(PolicyWatch, PeerWatch),
    ),
)
