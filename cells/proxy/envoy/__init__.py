"""Envoy: reads requests of HTTP and gRPC, and lets through those that policies allow.

Needs:  AgentConfig, Table[HTTPRedirect], KnownRules, EndpointPolicies, Table[Endpoint], ProxyPort, Counts,
        Ipcache, Events, ProxyStatistics.
Gives:  HTTPProxyPorts, Envoy.
Why:    rules may speak of requests (``rules.http``), which the datapath does not read: it redirects the
        connections that such rules select, and Envoy refuses what they do not allow.
"""

from cells.policy.control import HTTPProxyPorts
from cells.proxy.envoy.envoy import Envoy
from cells.proxy.envoy.ports import RedirectPorts
from cells.proxy.envoy.process import end_envoy
from cells.proxy.envoy.program import Program
from cells.proxy.envoy.settings import EnvoySettings
from lifecycle import config, group, invoke, module, provide

__all__ = ["Envoy", "EnvoySettings", "cell", "end_envoy"]


def http_proxy_ports(ports: RedirectPorts) -> HTTPProxyPorts:
    """Where connections are redirected to."""
    return ports


cell = group(
    module(
        "envoy-ports",
        "Where pods' requests are redirected to",
        config(EnvoySettings),
        provide(http_proxy_ports, RedirectPorts, Program),
    ),
    module("envoy", "Requests that policies allow", provide(Envoy), invoke(Envoy)),
)
