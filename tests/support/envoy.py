"""The bootstrap of an Envoy beside the agent, as the chart has it in the pod ``cilium-envoy``."""

from __future__ import annotations

from typing import Any, Final

from cells.proxy.envoy.resources import EnvoyFiles, bootstrap

ADMIN: Final = "admin"
HTTP: Final = "type.googleapis.com/envoy.extensions.filters"


def external_bootstrap(place: EnvoyFiles, address: str, health: int, metrics: int) -> dict[str, Any]:
    """Return the agent's bootstrap with ports for probes and metrics."""
    admin = {"endpoint": {"address": {"pipe": {"path": str(place.admin)}}}}
    cluster = {
        "name": ADMIN,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": ADMIN, "endpoints": [{"lb_endpoints": [admin]}]},
    }
    listeners = [
        _forwarding("health", address, health, "/healthz", "/ready"),
        _forwarding("metrics", "0.0.0.0", metrics, "/metrics", "/stats/prometheus"),
    ]
    return bootstrap(place) | {"static_resources": {"clusters": [cluster], "listeners": listeners}}


def _forwarding(name: str, address: str, port: int, path: str, to: str) -> dict[str, Any]:
    """Return a listener that sends the requests for one path to Envoy's administration."""
    route = {"match": {"path": path}, "route": {"cluster": ADMIN, "prefix_rewrite": to}}
    manager = {
        "@type": f"{HTTP}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{HTTP}.http.router.v3.Router"}}],
    }
    return {
        "name": name,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
