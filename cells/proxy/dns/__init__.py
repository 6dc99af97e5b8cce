"""The DNS proxy: which names pods may ask for, and which addresses names have.

Needs:  AgentConfig, Maps, Datapath, Table[Endpoint], RulePolicy, NamedAddresses, Ipcache, KnownRules,
        ProxyStatistics.
Gives:  DNSProxyPort, NameStore, DNSProxy, Table[TransparentProxy].
Why:    rules may speak of names (``toFQDNs``, ``rules.dns``), and what a name stands for is known by asking
        alone: queries of pods that such rules select pass through here.
"""

from collections.abc import Iterable

from cells.config import AgentConfig
from cells.maps import Maps
from cells.observe.metrics import Collector, Family
from cells.policy.control import DNSProxyPort, NamedAddresses, RulePolicy
from cells.proxy.dns.exchange import Counts
from cells.proxy.dns.journal import Journal
from cells.proxy.dns.kernel import KernelConnections
from cells.proxy.dns.port import ProxyPort
from cells.proxy.dns.proxy import DNSProxy
from cells.proxy.dns.routes import ProxyRoutes
from cells.proxy.dns.servers.transparent import TransparentProxy, transparent_proxies
from cells.proxy.dns.settings import DNSProxySettings
from cells.proxy.dns.store import Connections, NameStore
from cells.proxy.dns.told import LookupLog
from lifecycle import Member, config, group, invoke, module, provide, provide_private

__all__ = [
    "Connections",
    "Counts",
    "DNSProxy",
    "DNSProxyPort",
    "DNSProxySettings",
    "NameStore",
    "ProxyPort",
    "TransparentProxy",
    "cell",
]


def dns_proxy_port(port: ProxyPort) -> DNSProxyPort:
    """Where pods' queries are redirected to."""
    return port


def connections(maps: Maps) -> Connections:
    """This node's."""
    return KernelConnections(maps)


def journal(agent: AgentConfig) -> Journal:
    """In the state directory."""
    return Journal(agent.state_dir)


def dns_metrics(
    counts: Counts,
    store: NameStore,
    names: NamedAddresses,
    policy: RulePolicy,
    settings: DNSProxySettings,
) -> Member[Collector]:
    """Names and queries as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.proxy.dns.metrics import families

        return families(counts, store, names, policy, limited=settings.dnsproxy_concurrency_limit > 0)

    return Collector("dns-proxy", collect)


cell = group(
    module(
        "dns-proxy-port",
        "Where pods' queries are redirected to",
        config(DNSProxySettings),
        provide(ProxyPort, dns_proxy_port),
    ),
    module(
        "dns-proxy",
        "Names that pods ask for",
        provide(NameStore, DNSProxy, Counts, connections, dns_metrics, transparent_proxies),
        provide_private(journal, ProxyRoutes, LookupLog),
        invoke(DNSProxy),
    ),
)
