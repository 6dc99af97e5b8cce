"""The cell of Envoy, which enforces policy rules for HTTP and gRPC requests.

The datapath does not parse requests. It redirects connections that ``rules.http`` select to Envoy, which
rejects requests that no rule allows. The table ``http-redirects`` comes in, Envoy's configuration files and
the table of the proxy's state go out.
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from cells.base.metrics import Collector, features
from cells.endpoint import Endpoint
from cells.policy.control import HTTPProxyPorts, HTTPProxyState, HTTPRedirect
from cells.policy.maps import EndpointPolicies, KnownRules
from cells.proxy.dns import ProxyPort
from cells.proxy.envoy import resources
from cells.proxy.envoy.access_log import AccessLog, RequestParties
from cells.proxy.envoy.ports import EnvoyProgram, RedirectPorts
from cells.proxy.envoy.process import EnvoyError, Process, end_envoy, envoy_files
from cells.proxy.envoy.resources import EnvoyFiles, EnvoyProgramSettings, EnvoySettings, Resource
from cells.proxy.envoy.translated import TranslatedConnections
from lifecycle import Jobs, Member, Table, config, group, invoke, module, provide, provide_private

__all__ = ["Envoy", "EnvoyProgram", "EnvoyProgramSettings", "EnvoySettings", "cell", "end_envoy"]


# The state of a running Envoy, from its administration interface.
#
# Source: envoyproxy.io, the administration interface; version_text of xDS subscriptions.

CLUSTERS: Final = "cluster_manager.cds.version_text"
LISTENERS: Final = "listener_manager.lds.version_text"
ROUTES: Final = f"http.{resources.STATISTICS}.rds.{{}}.version_text"
WARMING: Final = "listener_manager.total_listeners_warming"
LOOPBACK: Final = ("127.0.0.1", "[::1]")


class SentConfiguration(NamedTuple):
    """The content of Envoy's files, to compare with the versions that Envoy has accepted."""

    redirects: list[HTTPRedirect]
    clusters: str
    """Version of the clusters' file, as below for the other files."""
    listeners: str
    routes: dict[str, str]
    """By redirect name."""


async def wait_exited(socket: Path) -> None:
    """Wait until Envoy closes an idle connection to its administration socket, usually on exit."""
    with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        async with await anyio.connect_unix(socket) as stream:
            await stream.receive()


async def accepted_redirects(socket: Path, sent: SentConfiguration) -> set[str] | None:
    """Return the names of the redirects that Envoy has accepted as sent; None if it does not answer.

    Envoy applies the valid listeners of a file, but reports the file's version only if all are valid.
    """
    import httpcore

    async def ask(path: str) -> list[str]:
        answer = await pool.request("GET", f"http://envoy/{path}")
        return answer.content.decode().splitlines()

    try:
        async with httpcore.AsyncConnectionPool(uds=str(socket)) as pool:
            lines = await ask("stats?filter=version_text$|listeners_warming$")
            shown = dict(line.split(": ", 1) for line in lines if ": " in line)
            if shown.get(CLUSTERS, "").strip('"') != sent.clusters:
                return set()
            names = {
                name
                for name, version in sent.routes.items()
                if shown.get(ROUTES.format(name), "").strip('"') == version
            }
            if shown.get(LISTENERS, "").strip('"') == sent.listeners and shown.get(WARMING) == "0":
                return names
            active = {tuple(line.split("::", 1)) for line in await ask("listeners")} if names else set()
    except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
        return None
    return {
        one.name
        for one in sent.redirects
        if one.name in names and any((one.name, f"{address}:{one.port}") in active for address in LOOPBACK)
    }


# Envoy's configuration: files that it watches, updated with the redirects.
#
# Why: Envoy can start from files while no agent runs. Each file is replaced atomically, in the order
#      clusters, routes, listeners, so that references are always to existing resources.

TIMEOUT_SECONDS: Final = 10.0
"""Seconds until a configuration that Envoy has not accepted is reported."""
MIN_POLL_INTERVAL: Final = 0.005
MAX_POLL_INTERVAL: Final = 0.5
"""Interval of polls of Envoy's statistics, in seconds: Envoy does not acknowledge files."""


class _Response(msgspec.Struct):
    resources: list[Resource]


class RealizedPolicies:
    """Waits until the policy maps of all endpoints are written."""

    def __init__(
        self, rules: KnownRules, endpoints: Table[int, Endpoint], policies: EndpointPolicies
    ) -> None:
        self._rules = rules
        self._endpoints = endpoints
        self._realized = policies.realized

    async def known(self) -> None:
        """Wait until every endpoint's policy by the current rules is written."""
        await self._rules.known()
        for endpoint in self._endpoints.all():
            while (seen := self._realized.get(endpoint.id)) is None or not seen.written:
                if self._endpoints.get(endpoint.id) is None:
                    break
                await self._realized.wait_changed(endpoint.id, seen)


class EnvoyConfiguration:
    """Writes Envoy's configuration files."""

    def __init__(
        self,
        settings: EnvoySettings,
        program: EnvoyProgram,
        files: EnvoyFiles,
        dns: ProxyPort,
        access_log: AccessLog,
    ) -> None:
        self._external = program.external
        self._settings = settings
        self._files = files
        self._dns = dns
        self._access_log = access_log
        self._previous: dict[str, dict[str, Resource]] = {"listeners": {}, "clusters": {}}
        """Resources of a previous agent, retained until all endpoints have their policies."""
        self._written: dict[Path, bytes] = {}

    def read_previous(self) -> None:
        """Read the resources of a previous agent, which stay until forget_previous()."""
        for name, path in (("listeners", self._files.listeners), ("clusters", self._files.clusters)):
            if path.exists() and path not in self._written and not self._previous[name]:
                self._previous[name] = {one["name"]: one for one in _resources(path)}

    def forget_previous(self) -> None:
        """Omit resources of a previous agent from now on."""
        self._previous = {"listeners": {}, "clusters": {}}

    async def wait_log_ready(self) -> None:
        """Wait until Envoy can open its access log: the pipe needs a reader."""
        if self._files.listeners.exists():
            await self._access_log.wait_ready()

    async def write(self, redirects: list[HTTPRedirect]) -> SentConfiguration | None:
        """Write all files; return None if Envoy was never needed. Raises OSError."""
        if not (redirects or self._external or self._files.listeners.exists()):
            return None
        await self._access_log.wait_ready()
        self._files.routes("").parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files.admin.parent.mkdir(mode=0o700, exist_ok=True)
        clusters = self._put(self._files.clusters, "clusters", resources.clusters(self._settings))
        routes: dict[str, str] = {}
        for one in redirects:
            content = _discovery([resources.routes(one, self._settings)])
            self._replace(self._files.routes(one.name), content)
            routes[one.name] = content["version_info"]
        addresses = ["127.0.0.1" if one == socket.AF_INET else "::1" for one in self._dns.families]
        wanted = resources.listeners(redirects, self._settings, self._files, addresses)
        listeners = self._put(self._files.listeners, "listeners", wanted)
        return SentConfiguration(redirects, clusters, listeners, routes)

    def remove_routes(self, redirects: list[HTTPRedirect]) -> None:
        """Remove the route files of redirects that no longer exist. Raises OSError.

        The previous agent's redirects count as existing until forget_previous().
        """
        needed = {one.name for one in redirects} | self._previous["listeners"].keys()
        for path in self._files.routes("").parent.glob("*.json"):
            if path.stem not in needed:
                path.unlink()
                self._written.pop(path, None)

    def _put(self, path: Path, kind: str, wanted: list[Resource]) -> str:
        """Write these resources and those of a previous agent; return the version."""
        content = _discovery((self._previous[kind] | {one["name"]: one for one in wanted}).values())
        self._replace(path, content)
        return str(content["version_info"])

    def _replace(self, path: Path, content: Resource) -> None:
        data = msgspec.json.encode(content)
        if self._written.get(path) == data:
            return
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        temporary.rename(path)
        self._written[path] = data


class Envoy:
    """Configures and runs Envoy, which keeps running when the agent stops."""

    def __init__(
        self,
        ports: RedirectPorts,
        redirects: Table[str, HTTPRedirect],
        state: Table[str, HTTPProxyState],
        policies: RealizedPolicies,
        configuration: EnvoyConfiguration,
        process: Process,
        *,
        jobs: Jobs,
    ) -> None:
        self._ports = ports
        self._redirects = redirects
        self._state = state
        self._policies = policies
        self._configuration = configuration
        self._process = process
        self._needed = anyio.Event()
        """Set by the first redirect."""
        self._configured = anyio.Event()
        """Set when Envoy has accepted its configuration."""
        self._sent = SentConfiguration([], "", "", {})
        self._acknowledged: dict[str, HTTPRedirect] = {}
        """The last accepted version of each redirect."""
        if not ports.serves:
            return
        jobs.observe("configure Envoy", self._changes, self._write)
        if process.external:
            jobs.one_shot("stop Envoy if an external one runs", process.end_managed)
        else:
            jobs.one_shot("run Envoy", self._run)
        jobs.one_shot("forget previous redirects", self._forget_previous)
        self._wait_acknowledged_soon = jobs.timer("await Envoy", self._wait_acknowledged, math.inf).trigger
        jobs.one_shot("watch for the end of Envoy", self._watch_exits)

    async def _run(self) -> None:
        """Run Envoy. Raises EnvoyError, OSError; the job retries."""
        await self._configuration.wait_log_ready()
        await self._process.run(self._needed)

    async def _changes(self) -> AsyncIterator[None]:
        self._configuration.read_previous()
        changes = self._redirects.changes()
        while True:
            changes.take()
            yield
            await changes.wait()

    async def _write(self, _: None) -> None:
        """Write the configuration of the current redirects. Raises OSError."""
        redirects = sorted(self._redirects.all(), key=lambda row: row.name)
        sent = await self._configuration.write(redirects)
        if sent is None:
            return
        self._sent = sent
        if redirects:
            self._needed.set()
            self._wait_acknowledged_soon()
        self._configuration.remove_routes(redirects)

    async def _wait_acknowledged(self) -> None:
        """Wait until Envoy has accepted its configuration. Raises EnvoyError; the timer retries."""
        names: set[str] | None = None
        with anyio.move_on_after(TIMEOUT_SECONDS):
            pause = MIN_POLL_INTERVAL
            while True:
                sent = self._sent
                names = await accepted_redirects(self._process.admin, sent) if sent.redirects else set()
                if names is not None and sent is self._sent:
                    self._set_acknowledged(sent, names)
                    if len(names) == len(sent.redirects):
                        self._report(HTTPProxyState(runs=True))
                        return
                await anyio.sleep(pause)
                pause = min(2 * pause, MAX_POLL_INTERVAL)
        see = f"see {self._process.log_place}"
        if names is None:
            message = f"Envoy does not run: connections that rules.http select are dropped; {see}"
            self._report(HTTPProxyState(runs=False, message=message))
        else:
            refused = tuple(
                one for one in self._sent.redirects if self._acknowledged.get(one.name) is not one
            )
            message = (
                f"Envoy has not accepted the rules for {TIMEOUT_SECONDS:g} s, the previous ones hold: {see}"
            )
            self._report(HTTPProxyState(runs=True, message=message, refused=refused))
        raise EnvoyError(message)

    def _set_acknowledged(self, sent: SentConfiguration, names: set[str]) -> None:
        """Record the accepted redirects; for each other one, the version accepted before stays in force."""
        if sent.redirects:
            self._configured.set()
        found = {
            one.name: one if one.name in names else self._acknowledged.get(one.name) for one in sent.redirects
        }
        self._acknowledged = {name: one for name, one in found.items() if one is not None}
        held = next(iter(self._state.all()), None)
        self._report(held if held is not None and held.runs else HTTPProxyState(runs=True))

    def _report(self, state: HTTPProxyState) -> None:
        state = msgspec.structs.replace(state, acknowledged=tuple(self._acknowledged.values()))
        if self._state.get(state.name) != state:
            with self._state.txn() as rows:
                rows.put(state)

    async def _watch_exits(self) -> None:
        """After each exit of Envoy, check whether the next process accepts its configuration."""
        while True:
            await self._configured.wait()
            self._configured = anyio.Event()
            await wait_exited(self._process.admin)
            self._wait_acknowledged_soon()

    async def _forget_previous(self) -> None:
        """Drop the previous agent's configuration once every endpoint's policy is written."""
        await self._policies.known()
        self._configuration.forget_previous()
        self._ports.release_others({one.name for one in self._redirects.all()})
        await self._write(None)


def _resources(path: Path) -> Iterable[Any]:
    """Return the resources in a file; none if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Response).resources
    except (OSError, ValueError):
        return ()


def _discovery(found: Iterable[Resource]) -> Resource:
    """Return a DiscoveryResponse with its digest as the version."""
    needed = list(found)
    return resources.discovery(hashlib.sha256(msgspec.json.encode(needed)).hexdigest()[:16], needed)


def envoy_features(program: EnvoyProgram) -> Member[Collector]:
    """Return the feature metric of Envoy's mode; no mode if Envoy is not installed."""
    mode = "standalone" if program.external else "embedded" if program.path is not None else ""
    return features("envoy-features", lambda: {"adv_connect_and_lb_envoy_proxy_enabled": mode})


cell = group(
    module(
        "envoy-ports",
        "Redirects of pods' HTTP requests",
        config(EnvoyProgramSettings),
        provide(RedirectPorts, as_=(HTTPProxyPorts,)),
        provide(EnvoyProgram, envoy_features),
    ),
    module(
        "envoy",
        "Requests that policies allow",
        config(EnvoySettings),
        provide(Envoy),
        provide_private(
            envoy_files, RequestParties, AccessLog, RealizedPolicies, EnvoyConfiguration, Process
        ),
        invoke(Envoy),
    ),
    module(
        "translated-connections",
        "nftables for requests kube-proxy translates",
        provide(TranslatedConnections),
        invoke(TranslatedConnections),
    ),
)
