"""The cell of the DNS proxy: it enforces ``rules.dns`` and learns addresses for ``toFQDNs``.

The datapath redirects queries of pods with such rules to the proxy. Addresses of names come only from answers
to the pods' own queries.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from ipaddress import ip_address

from anyio import to_thread

from cells.base.addresses import IPAddress
from cells.base.metrics import Collector, MetricFamily, counter, gauge, histogram
from cells.config import AgentConfig
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.flows import CT_OUT, CtEntry
from cells.policy.control import DNSProxyPort, NamedAddresses, RulePolicy
from cells.proxy.dns.exchange import Counts, DNSAccessLog, LearntAddresses, QueryPolicy
from cells.proxy.dns.port import ProxyPort, ProxyRoutes, QuerySource, TransparentProxy, transparent_proxies
from cells.proxy.dns.proxy import DNSProxy
from cells.proxy.dns.settings import DNSPortSettings, DNSProxySettings
from cells.proxy.dns.store import Connections, Journal, NameStore
from lifecycle import Member, config, group, invoke, module, provide, provide_private

__all__ = [
    "Connections",
    "Counts",
    "DNSProxy",
    "DNSProxySettings",
    "NameStore",
    "ProxyPort",
    "QuerySource",
    "TransparentProxy",
    "cell",
]


class ConntrackConnections:
    """Live connections, read from the conntrack maps."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    async def alive(self, addresses: Collection[IPAddress]) -> set[tuple[IPAddress, IPAddress]]:
        """Return live connections from pods to these addresses. Raises OSError."""
        return await to_thread.run_sync(self._alive, {one.packed for one in addresses})

    def _alive(self, packed: Collection[bytes]) -> set[tuple[IPAddress, IPAddress]]:
        """Read all conntrack maps.

        Entries of connections that a pod opened have the flag CT_OUT and start with the pod's address
        (CtKey).
        """
        now = int(time.clock_gettime(time.CLOCK_MONOTONIC))
        found = set()
        for each in self._maps.conntrack:
            with map_by_id(each.id, each.spec.name) as table:
                for key, value in table.items():
                    size = (len(key) - 6) // 2
                    peer = key[size : 2 * size]
                    if peer in packed and key[-1] == CT_OUT and CtEntry.unpack(value).lifetime >= now:
                        found.add((ip_address(key[:size]), ip_address(peer)))
        return found


def journal(agent: AgentConfig) -> Journal:
    """Return the journal in the state directory."""
    return Journal(agent.state_dir)


# Metrics of the proxy and of names.
#
# Source: Cilium 1.17, cilium_policy_l7_total, cilium_proxy_*, cilium_fqdn_*.

RULES = ("received", "forwarded", "denied", "parse_errors")


def families(
    counts: Counts, store: NameStore, names: NamedAddresses, policy: RulePolicy, *, limited: bool
) -> Iterator[MetricFamily]:
    """Yield the metrics of the proxy and of names.

    ``limited``: whether dnsproxy-concurrency-limit is set.
    """
    by_rule = {(rule, "fqdn"): counts.l7[rule] for rule in RULES}
    yield counter(
        "cilium_policy_l7_total",
        "Number of total proxy requests handled",
        by_rule | {(rule, "envoy"): counts.requests[rule] for rule in RULES},
        "rule proxy_type",
    )
    redirects = Counter(filter_.parser for filter_ in policy.computed.filters())
    yield gauge(
        "cilium_proxy_redirects",
        "Number of redirects installed for endpoints, labeled by protocol",
        {parser: redirects[parser] for parser in ("dns", "http")},
        "protocol_l7",
    )
    yield histogram(
        "cilium_proxy_upstream_reply_seconds",
        "Seconds waited to get a reply from a upstream server",
        {(error, "DNS", scope): spread for (error, scope), spread in counts.seconds.items()},
        "error protocol_l7 scope",
    )
    yield counter(
        "cilium_proxy_datapath_update_timeout_total",
        "Number of total datapath update timeouts due to FQDN IP updates",
        counts.update_timeouts,
        on=False,
    )
    yield counter(
        "cilium_fqdn_gc_deletions_total",
        "Number of FQDNs that have been cleaned on FQDN Garbage collector job",
        store.deleted,
    )
    yield gauge("cilium_fqdn_selectors", "Number of registered ToFQDN selectors", len(names.selectors))
    endpoints = {str(number): of for number, of in store.of.items() if number}
    for name, text, values in (
        (
            "cilium_fqdn_active_names",
            "Number of domains inside the DNS cache that have not expired (by TTL), per endpoint",
            {number: of.names for number, of in endpoints.items()},
        ),
        (
            "cilium_fqdn_active_ips",
            (
                "Number of IPs inside the DNS cache associated with a domain that has not expired "
                "(by TTL), per endpoint"
            ),
            {number: of.addresses for number, of in endpoints.items()},
        ),
        (
            "cilium_fqdn_alive_zombie_connections",
            (
                "Number of IPs associated with domains that have expired (by TTL) yet still associated "
                "with an active connection (aka zombie), per endpoint"
            ),
            {number: len(of.zombies) for number, of in endpoints.items()},
        ),
    ):
        yield gauge(name, text, values, "endpoint", on=False)
    yield counter(
        "cilium_fqdn_semaphore_rejected_total",
        "Number of DNS request rejected by the DNS Proxy's admission semaphore",
        counts.rejected,
        on=limited,
    )


def dns_metrics(
    counts: Counts,
    store: NameStore,
    names: NamedAddresses,
    policy: RulePolicy,
    settings: DNSProxySettings,
) -> Member[Collector]:
    """Return the collector of the proxy's metrics."""

    async def collect() -> Iterable[MetricFamily]:
        return families(counts, store, names, policy, limited=settings.dnsproxy_concurrency_limit > 0)

    return Collector("dns-proxy", collect)


cell = group(
    module(
        "dns-proxy-port",
        "Redirects of pods' DNS queries",
        config(DNSPortSettings),
        provide(ProxyPort, as_=(DNSProxyPort,)),
    ),
    module(
        "dns-proxy",
        "DNS names that pods look up",
        config(DNSProxySettings),
        provide(NameStore, DNSProxy, Counts, QuerySource, dns_metrics, transparent_proxies),
        provide(ConntrackConnections, as_=(Connections,)),
        provide_private(journal, ProxyRoutes, DNSAccessLog, QueryPolicy, LearntAddresses),
        invoke(DNSProxy),
    ),
)
