"""``cilium-dbg status``: the agent's status in Cilium's words and order.

Source: Cilium 1.17, pkg/client (FormatStatusResponse), pkg/health/client, cilium-dbg/cmd/status.go.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import click

from hive.dbg.go_text import (
    STATUS,
    ago,
    aligned,
    model,
    output_option,
    parse_duration,
    printed,
    short_age,
    table,
)
from hive.dbg.requests import RequestFailedError, ask, decoded, send, socket_path

Json = dict[str, Any]

_HEALTHY: Final = {"Ok", "Disabled"}
_UNHEALTHY: Final = {"Warning", "Failure"}
_DEVICE_MODES: Final = {"veth", "netkit", "netkit-l2"}
_HEALTH_CONTROLLER: Final = "cilium-health-ep"
"""The controller of the health endpoint; without it there are no probes to report."""
_NEVER: Final = "0001-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Details:
    """The parts that are printed in full."""

    addresses: bool = False
    controllers: bool = False
    redirects: bool = False
    clusters: bool = False
    verbose: bool = False
    """Clock source, kube-proxy replacement, sizes of maps."""


ALL: Final = Details(addresses=True, controllers=True, redirects=True, clusters=True, verbose=True)


@click.command()
@click.option("--all-addresses", is_flag=True, help="Show all allocated addresses, not just count")
@click.option("--all-clusters", is_flag=True, help="Show all clusters")
@click.option("--all-controllers", is_flag=True, help="Show all controllers, not just failing")
@click.option("--all-health", is_flag=True, help="Show all health status, not just failing")
@click.option("--all-nodes", is_flag=True, help="Show all nodes, not just localhost")
@click.option("--all-redirects", is_flag=True, help="Show all redirects")
@click.option("--brief", is_flag=True, help="Only print a one-line status message")
@click.option(
    "--require-k8s-connectivity",
    type=bool,
    default=True,
    is_flag=False,
    flag_value=True,
    help="If true, when the cilium-agent cannot access the Kubernetes control plane, report failure",
)
@click.option("--timeout", default="30s", help="Sets the timeout to use when querying for health")
@click.option("--verbose", is_flag=True, help="Equivalent to --all-addresses --all-controllers ...")
@output_option
def command(
    all_addresses: bool,
    all_clusters: bool,
    all_controllers: bool,
    all_health: bool,
    all_nodes: bool,
    all_redirects: bool,
    brief: bool,
    require_k8s_connectivity: bool,
    timeout: str,
    verbose: bool,
    output: str,
) -> int:
    """Display status of daemon"""
    headers = {
        "Brief": "true" if brief else "false",
        "Require-K8s-Connectivity": "true" if require_k8s_connectivity else "false",
    }
    try:
        status = ask("GET /healthz", headers=headers, timeout=parse_duration(timeout) or 30.0)
        _check(status)
    except RequestFailedError as error:
        click.echo("cilium: daemon unreachable" if brief else str(error), err=True)
        return 1
    if output:
        click.echo(printed(model(status, STATUS), output, "cells.api.models.status:StatusResponse"))
        return 0
    if brief:
        click.echo(brief_text(status))
        return int(unhealthy(status))
    details = ALL if verbose else Details(all_addresses, all_controllers, all_redirects, all_clusters)
    lines = status_text(status, details)
    bad = unhealthy(status)
    lines += "" if bad else "".join(_health(status, verbose or all_nodes, verbose or all_health))
    click.echo(aligned(lines, least=2), nl=False)
    return int(bad)


def _check(status: Json) -> None:
    """Raise RequestFailedError for a duration that the client cannot decode."""
    uptime = ((status.get("hubble") or {}).get("observer") or {}).get("uptime", "")
    if not isinstance(uptime, str):
        field = "HubbleStatusObserver.hubble.observer.uptime"
        raise RequestFailedError(f"json: cannot unmarshal number into Go struct field {field} of type string")


def unhealthy(status: Json) -> bool:
    """Whether the agent reports a failure."""
    return "cilium" in status and (status["cilium"] or {}).get("state") not in _HEALTHY


def brief_text(status: Json) -> str:
    """Return ``OK``, or the first failure."""
    health = (status.get("cluster") or {}).get("ciliumHealth")
    parts = {
        "kvstore": status.get("kvstore"),
        "container runtime": status.get("container-runtime"),
        "kubernetes": status.get("kubernetes"),
        "cilium": status.get("cilium"),
        "cilium-health": health,
    }
    for name, part in parts.items():
        if part and part.get("state") in _UNHEALTHY:
            return f"error in {name}: {part.get('msg', '')}"
    for one in status.get("controllers") or ():
        if message := (one.get("status") or {}).get("last-failure-msg"):
            return f"error in controller {one.get('name', '')}: {message}"
    return "OK"


def status_text(status: Json, details: Details) -> str:
    """Return lines with tab-separated cells; nested tables are already aligned."""
    parts = (
        _connections(status),
        _features(status),
        _agent(status),
        _network(status, details),
        _routing(status, details),
        _work(status, details),
        _limits(status, details),
    )
    return "".join(line for part in parts for line in part)


def _enabled(value: object) -> str:
    return "Enabled" if value else "Disabled"


def _devices(replacement: Json) -> str:
    """Return devices with their addresses, and which of them is the direct routing device."""
    if replacement.get("mode") == "False":
        return ""
    text, names = "", replacement.get("devices") or ()
    for number, device in enumerate(replacement.get("deviceList") or (), 1):
        direct = device.get("name") == replacement.get("directRoutingDevice")
        text += f"{device.get('name', '')} {' '.join(device.get('ip') or ())}"
        text += (" (Direct Routing)" if direct else "") + (", " if number != len(names) else "")
    return text


def _connections(status: Json) -> Iterator[str]:
    for name, key in (("KVStore", "kvstore"), ("ContainerRuntime", "container-runtime")):
        if (part := status.get(key)) is not None:
            yield f"{name}:\t{part.get('state', '')}\t{part.get('msg', '')}\n"
    if (kubernetes := status.get("kubernetes")) is not None:
        yield f"Kubernetes:\t{kubernetes.get('state', '')}\t{kubernetes.get('msg', '')}\n"
        if kubernetes.get("state") != "Disabled":
            kinds = '", "'.join(sorted(kubernetes.get("k8s-api-versions") or ()))
            yield f'Kubernetes APIs:\t["{kinds}"]\n'
    if (replacement := status.get("kube-proxy-replacement")) is not None:
        devices = _devices(replacement)
        yield f"KubeProxyReplacement:\t{replacement.get('mode', '')}\t{f'[{devices}]' if devices else ''}\n"


def _features(status: Json) -> Iterator[str]:
    if (firewall := status.get("host-firewall")) is not None:
        mode = firewall.get("mode", "")
        devices = "" if mode == "Disabled" else f"\t[{', '.join(firewall.get('devices') or ())}]"
        yield f"Host firewall:\t{mode}{devices}\n"
    if (srv6 := status.get("srv6")) is not None:
        mode = f"\t[encap-mode: {srv6.get('srv6EncapMode', '')}]" if srv6.get("enabled") else ""
        yield f"SRv6:\t{_enabled(srv6.get('enabled'))}{mode}\n"
    if (chaining := status.get("cni-chaining")) is not None:
        yield f"CNI Chaining:\t{chaining.get('mode', '')}\n"
    if (file := status.get("cni-file")) is not None:
        yield f"CNI Config file:\t{file.get('msg', '')}\n"


def _agent(status: Json) -> Iterator[str]:
    if (cilium := status.get("cilium")) is not None:
        yield f"Cilium:\t{cilium.get('state', '')}   {cilium.get('msg', '')}\n"
    if (stale := status.get("stale")) is not None:
        texts = (f'"{name}" since {stale[name]}' for name in sorted(stale))
        yield f"Stale status:\t{', '.join(texts)}\n"
    if (monitor := status.get("nodeMonitor")) is not None:
        size = f"{monitor.get('npages', 0)}x{monitor.get('pagesize', 0)} of shared memory"
        yield f"NodeMonitor:\tListening for events on {monitor.get('cpus', 0)} CPUs with {size}\n"
        if monitor.get("lost") or monitor.get("unknown"):
            lost, unknown = monitor.get("lost", 0), monitor.get("unknown", 0)
            yield f"\t{lost} events lost, {unknown} unknown notifications\n"
    else:
        yield "NodeMonitor:\tDisabled\n"
    if (health := (status.get("cluster") or {}).get("ciliumHealth")) is not None:
        yield f"Cilium health daemon:\t{health.get('state', '')}\t{health.get('msg', '')}\n"


def _network(status: Json, details: Details) -> Iterator[str]:
    if (ipam := status.get("ipam")) is not None:
        yield f"IPAM:\t{ipam.get('status', '')}\n"
        if details.addresses:
            yield "Allocated addresses:\n"
            owners = ipam.get("allocations") or {}
            yield from sorted(f"  {address} ({owner})\n" for address, owner in owners.items())
    if (mesh := status.get("cluster-mesh")) is not None:
        yield from _clusters(mesh, details)
    for family in ("4", "6"):
        if (big := status.get(f"ipv{family}-big-tcp")) is not None:
            sizes = dict.fromkeys((big.get("maxGRO", 0), big.get("maxGSO", 0)))
            text = f"\t[{', '.join(map(str, sizes))}]" if big.get("enabled") else ""
            yield f"IPv{family} BIG TCP:\t{_enabled(big.get('enabled'))}{text}\n"
    if (bandwidth := status.get("bandwidth-manager")) is not None:
        control = str(bandwidth.get("congestionControl", "")).upper()
        edt = f"EDT with BPF [{control}] [{', '.join(bandwidth.get('devices') or ())}]"
        yield f"BandwidthManager:\t{edt if bandwidth.get('enabled') else 'Disabled'}\n"


def _routing(status: Json, details: Details) -> Iterator[str]:
    if (routing := status.get("routing")) is not None:
        mode = routing.get("inter-host-routing-mode", "")
        mode += f" [{routing.get('tunnel-protocol', '')}]" if mode == "Tunnel" else ""
        yield f"Routing:\tNetwork: {mode}\tHost: {routing.get('intra-host-routing-mode', '')}\n"
    if attach := status.get("attach-mode"):
        yield f"Attach Mode:\t{'TCX' if attach == 'tcx' else 'Legacy TC'}\n"
    if device := status.get("datapath-mode"):
        yield f"Device Mode:\t{device if device in _DEVICE_MODES else '?'}\n"
    if (masquerading := status.get("masquerading")) is not None:
        yield f"Masquerading:\t{_masquerading(masquerading, status.get('kube-proxy-replacement'))}\n"
    if details.verbose and (clock := status.get("clock-source")) is not None:
        hertz = f"\t[{clock.get('hertz', 0)} Hz]" if clock.get("mode") == "jiffies" else ""
        yield f"Clock Source for BPF:\t{clock.get('mode', '')}{hertz}\n"


def _masquerading(masquerading: Json, replacement: Json | None) -> str:
    families = masquerading.get("enabledProtocols")
    if families is None:
        return _enabled(masquerading.get("enabled"))
    if not families.get("ipv4") and not families.get("ipv6"):
        return "Disabled"
    text = {"BPF": "BPF", "iptables": "IPTables"}.get(masquerading.get("mode", ""), "")
    if text == "BPF":
        text += " (ip-masq-agent)" if masquerading.get("ip-masq-agent") else ""
        if replacement is not None:
            devices = ", ".join(one.get("name", "") for one in replacement.get("deviceList") or ())
            text += f"\t[{devices}]\t{masquerading.get('snat-exclusion-cidr-v4', '')}"
    return f"{text} [IPv4: {_enabled(families.get('ipv4'))}, IPv6: {_enabled(families.get('ipv6'))}]"


def _clusters(mesh: Json, details: Details) -> Iterator[str]:
    clusters = mesh.get("clusters") or ()
    ready = sum(bool(one.get("ready")) for one in clusters)
    shared = mesh.get("num-global-services", 0)
    yield f"ClusterMesh:\t{ready}/{len(clusters)} remote clusters ready, {shared} global-services\n"
    for one in clusters:
        if one.get("ready") and not details.clusters:
            continue
        counts = ", ".join(
            f"{one.get(key, 0)} {what}"
            for key, what in (
                ("num-nodes", "nodes"),
                ("num-endpoints", "endpoints"),
                ("num-identities", "identities"),
                ("num-shared-services", "services"),
                ("num-service-exports", "MCS-API service exports"),
                ("num-failures", "reconnections"),
            )
        )
        state = "ready" if one.get("ready") else "not-ready"
        yield f"   {one.get('name', '')}: {state}, {counts} (last: {ago(one.get('last-failure'))})\n"
        yield f"   └  {one.get('status', '')}\n"
        yield f"   └  remote configuration: {_remote_configuration(one.get('config'))}\n"
        if (synced := one.get("synced")) is not None:
            names = ["nodes", "endpoints", "identities", "services"]
            texts = [f"{name}={_go_text(synced.get(name))}" for name in names]
            if "service-exports" in synced:
                texts.append(f"service-exports={_go_text(synced['service-exports'])}")
            yield f"   └  synchronization status: {', '.join(texts)}\n"


def _go_text(value: object) -> str:
    return "true" if value else "false"


def _remote_configuration(config: Json | None) -> str:
    if config is None:
        return "expected=unknown, retrieved=unknown"
    text = f"expected={_go_text(config.get('required'))}, retrieved={_go_text(config.get('retrieved'))}"
    if config.get("retrieved"):
        exports = config.get("service-exports-enabled")
        word = "unsupported" if exports is None else "enabled" if exports else "disabled"
        text += (
            f", cluster-id={config.get('cluster-id', 0)}, kvstoremesh={_go_text(config.get('kvstoremesh'))},"
            f" sync-canaries={_go_text(config.get('sync-canaries'))}, service-exports={word}"
        )
    return text


def _work(status: Json, details: Details) -> Iterator[str]:
    if (controllers := status.get("controllers")) is not None:
        yield from _controllers(controllers, details)
    if (proxy := status.get("proxy")) is not None:
        total = proxy.get("total-redirects", 0)
        yield (
            f"Proxy Status:\tOK, ip {proxy.get('ip', '')}, {total} redirects active on ports "
            f"{proxy.get('port-range', '')}, Envoy: {proxy.get('envoy-deployment-mode', '')}\n"
        )
        if details.redirects and total:
            rows = sorted(
                f"  {one.get('proxy', '')}\t{one.get('name', '')}\t{one.get('proxy-port', 0)}\n"
                for one in proxy.get("redirects") or ()
            )
            yield aligned("  Protocol\tRedirect\tProxy Port\n" + "".join(rows), least=0)
    else:
        yield "Proxy Status:\tNo managed proxy redirect\n"


def _limits(status: Json, details: Details) -> Iterator[str]:
    if (identities := status.get("identity-range")) is not None:
        least, most = identities.get("min-identity", 0), identities.get("max-identity", 0)
        yield f"Global Identity Range:\tmin {least}, max {most}\n"
    else:
        yield "Global Identity Range:\tUnknown\n"
    if (hubble := status.get("hubble")) is not None:
        yield "\t".join(("Hubble:", *_hubble(hubble))) + "\n"
    if details.verbose and status.get("kubernetes") is not None:
        yield from _replacement(status.get("kube-proxy-replacement"))
    if details.verbose and (maps := status.get("bpf-maps")) is not None:
        ratio = maps.get("dynamic-size-ratio", 0)
        yield f"BPF Maps:\tdynamic sizing: {f'on (ratio: {ratio:f})' if 0 < ratio <= 1 else 'off'}\n"
        sizes = [(f"  {one.get('name', '')}", one.get("size", 0)) for one in maps.get("maps") or ()]
        yield table(("  Name", "Size"), sizes) + "\n"
    if (encryption := status.get("encryption")) is not None:
        yield f"Encryption:\t{encryption.get('mode', '')}\t{', '.join(_encryption(encryption))}\n"


def _controllers(controllers: list[Json], details: Details) -> Iterator[str]:
    failing = 0
    rows = []
    for one in controllers:
        if (state := one.get("status")) is None:
            continue
        failures = state.get("consecutive-failure-count", 0)
        failing += bool(failures)
        if failures or details.controllers:
            success, failure = state.get("last-success-timestamp"), state.get("last-failure-timestamp")
            message = state.get("last-failure-msg") or "no error"
            rows.append(f"  {one.get('name', '')}\t{ago(success)}\t{ago(failure)}\t{failures}\t{message}\t\n")
    yield f"Controller Status:\t{len(controllers) - failing}/{len(controllers)} healthy\n"
    if rows:
        header = "  Name\tLast success\tLast error\tCount\tMessage\n"
        yield aligned("".join(sorted((header, *rows))), least=0)


def _hubble(hubble: Json) -> Iterator[str]:
    yield " ".join(filter(None, (hubble.get("state", ""), hubble.get("msg"))))
    if (observer := hubble.get("observer")) is not None:
        texts = []
        current, most = observer.get("current-flows", 0), observer.get("max-flows", 0)
        if most:
            texts.append(f"Current/Max Flows: {current}/{most} ({current / most * 100:.2f}%)")
        if seconds := parse_duration(observer.get("uptime", "")):
            texts.append(f"Flows/s: {observer.get('seen-flows', 0) / seconds:.2f}")
        yield ", ".join(texts)
    if (metrics := hubble.get("metrics")) is not None:
        yield f"Metrics: {metrics.get('state', '')}"


def _replacement(replacement: Json | None) -> Iterator[str]:
    """Return the details of the kube-proxy replacement."""
    if replacement is None:
        return
    features = replacement.get("features") or {}
    node_port = features.get("nodePort") or {}
    served = bool(node_port.get("enabled"))
    rows = {
        "Status": replacement.get("mode", ""),
        "Socket LB": _enabled((features.get("socketLB") or {}).get("enabled")),
        "Socket LB Tracing": _enabled((features.get("socketLBTracing") or {}).get("enabled")),
        "Socket LB Coverage": "Hostns-only" if features.get("bpfSocketLBHostnsOnly") else "Full",
    }
    if devices := _devices(replacement):
        rows["Devices"] = devices
    if served:
        rows["Mode"] = node_port.get("mode", "")
        if node_port.get("mode") in {"DSR", "Hybrid"}:
            rows["  DSR Dispatch Mode"] = node_port.get("dsrMode", "")
        chosen = node_port.get("algorithm", "")
        size = f" (Table Size: {node_port.get('lutSize', 0)})" if chosen == "Maglev" else ""
        rows["Backend Selection"] = chosen + size
        rows = {name: value for name, value in rows.items() if value or name == "Status"}
    rows["Session Affinity"] = _enabled((features.get("sessionAffinity") or {}).get("enabled"))
    rows["Graceful Termination"] = _enabled((features.get("gracefulTermination") or {}).get("enabled"))
    nat = features.get("nat46X64") or {}
    yield "KubeProxyReplacement Details:\n"
    text = "".join(f"  {name}:\t{value}\n" for name, value in rows.items())
    if nat.get("enabled"):
        gateway = nat.get("gateway") or {}
        text += f"  NAT46/64 Support:\n  - Services:\t{_enabled((nat.get('service') or {}).get('enabled'))}\n"
        text += f"  - Gateway:\t{_enabled(gateway.get('enabled'))}\n"
        if gateway.get("enabled") and gateway.get("prefixes"):
            text += f"    Prefixes:\t{', '.join(gateway['prefixes'])}\n"
    else:
        text += "  NAT46/64 Support:\tDisabled\n"
    if served and node_port.get("acceleration"):
        text += f"  XDP Acceleration:\t{node_port.get('acceleration', '')}\n"
    ports = f" (Range: {node_port.get('portMin', 0)}-{node_port.get('portMax', 0)})" if served else ""
    external = _enabled((features.get("externalIPs") or {}).get("enabled"))
    text += (
        "  Services:\n  - ClusterIP:\tEnabled\n"
        f"  - NodePort:\t{_enabled(served)}{ports} \n"
        f"  - LoadBalancer:\t{_enabled(served)} \n"
        f"  - externalIPs:\t{external} \n"
        f"  - HostPort:\t{_enabled((features.get('hostPort') or {}).get('enabled'))}\n"
    )
    yield aligned(text, least=0)


def _encryption(encryption: Json) -> Iterator[str]:
    if encryption.get("msg"):
        yield encryption["msg"]
    elif (wireguard := encryption.get("wireguard")) is not None:
        devices = (
            f"{one.get('name', '')} (Pubkey: {one.get('public-key', '')}, Port: {one.get('listen-port', 0)},"
            f" Peers: {one.get('peer-count', 0)})"
            for one in wireguard.get("interfaces") or ()
        )
        nodes = f"NodeEncryption: {wireguard.get('node-encryption', '')}"
        yield f"[{nodes}, {', '.join(devices)}]"


def _health(status: Json, all_nodes: bool, verbose: bool) -> Iterator[str]:
    """Yield the results of probes, and the agent's modules."""
    controllers = status.get("controllers") or ()
    if not any(one.get("name") == _HEALTH_CONTROLLER for one in controllers):
        yield "Cluster health:\t\tProbe disabled\n"
        return
    try:
        code, content = send("GET", "/v1beta/status", socket=socket_path().with_name("health.sock"))
        probed = decoded(content) if code == 200 else None
    except RequestFailedError:
        probed = None
    if probed is None:
        yield "Cluster health:\t\t\tWarning\tcilium-health daemon unreachable\n"
    else:
        yield from _probes(probed, all_nodes)
    yield from _modules(verbose)


def _probes(probed: Json, all_nodes: bool) -> Iterator[str]:
    own = (probed.get("local") or {}).get("name", "")
    nodes = [
        (one, _reachable(one, "host"), _reachable(one, "health-endpoint"))
        for one in probed.get("nodes") or ()
    ]
    good = sum(host and endpoint for _, host, endpoint in nodes)
    yield f"Cluster health:\t{good}/{len(nodes)} reachable\t({probed.get('timestamp', '')})\n"
    if not all_nodes and good == len(nodes):
        return
    yield "  Name\tIP\tNode\tEndpoints\n"
    words = {True: "reachable", False: "unreachable"}
    for one, host, endpoint in nodes:
        if all_nodes or not (host and endpoint):
            name = one.get("name", "")
            local = " (localhost)" if name == own else ""
            ip = ((one.get("host") or {}).get("primary-address") or {}).get("ip", "")
            yield f"  {name}{local}\t{ip}\t{words[host]}\t{words[endpoint]}\n"


def _reachable(node: Json, part: str) -> bool:
    addresses = node.get(part) or {}
    paths = [addresses.get("primary-address") or {}, *(addresses.get("secondary-addresses") or ())]
    kinds = [path[kind] for path in paths for kind in ("http", "icmp") if path.get(kind)]
    return bool(kinds) and not any(kind.get("status") for kind in kinds)


def _modules(verbose: bool) -> Iterator[str]:
    """Return the agent's health: counts, or its tree."""
    query = {"key": "YWdlbnQ=", "table": "health", "index": "identifier", "lowerbound": True}
    try:
        code, content = send("GET", "/statedb/query", query)
        rows = [decoded(line)["obj"] for line in content.splitlines() if line] if code == 200 else []
    except (RequestFailedError, KeyError):
        rows = []
    if not verbose:
        levels = {
            level: sum(row.get("Level") == level for row in rows) for level in ("Stopped", "Degraded", "OK")
        }
        yield f"Modules Health:\t{' '.join(f'{level}({count})' for level, count in levels.items())}\n"
        return
    yield "Modules Health:\n"
    tree: Json = {}
    for row in rows:
        names = [*(row.get("ID") or {}).get("Module", ()), *(row.get("ID") or {}).get("Component", ())]
        place = tree
        for name in names:
            place = place.setdefault(name, {})
        place[""] = row
    yield "".join(f"      {line}\n" for line in _leaves(_branches(tree)))


def _branches(tree: Json, before: str = "", *, root: bool = True) -> Iterator[tuple[str, Json | None]]:
    names = sorted(name for name in tree if name)
    for number, name in enumerate(names):
        last = number == len(names) - 1
        corner, below = ("", "") if root else ("└── ", "    ") if last else ("├── ", "│   ")
        yield before + corner + name, tree[name].get("")
        yield from _branches(tree[name], before + below, root=False)


def _leaves(lines: Iterable[tuple[str, Json | None]]) -> Iterator[str]:
    for text, row in lines:
        if row is None:
            yield text
            continue
        level = str(row.get("Level", "")).upper()
        message = row.get("Message") or row.get("Error") or row.get("Final") or ""
        since = short_age(row.get("Updated", _NEVER))
        yield f"{text}\t[{level}] {message} ({since}, x{row.get('Count', 0)})"
    yield ""
