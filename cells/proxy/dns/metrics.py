"""The DNS proxy and its names as Cilium's metrics.

Source: Cilium 1.17, cilium_policy_l7_total, cilium_proxy_*, cilium_fqdn_*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cells.base.metrics import MetricFamily, counter, gauge, histogram
from cells.policy.control import NamedAddresses, RulePolicy
from cells.proxy.dns.exchange import Counts
from cells.proxy.dns.store import NameStore

RULES = ("received", "forwarded", "denied", "parse_errors")


def families(
    counts: Counts, store: NameStore, names: NamedAddresses, policy: RulePolicy, *, limited: bool
) -> Iterator[MetricFamily]:
    """What passed the proxy, and what is known of names. ``limited``: there may be too many queries."""
    seen = {(rule, "fqdn"): counts.l7[rule] for rule in RULES}
    yield counter(
        "cilium_policy_l7_total",
        "Number of total proxy requests handled",
        seen | {(rule, "envoy"): counts.requests[rule] for rule in RULES},
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
