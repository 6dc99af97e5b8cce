"""``hive status``: the status of the running agent, in the lines of Cilium's status."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from http.client import NOT_FOUND
from pathlib import Path
from typing import Any

import click

from hive.agent.health import node_state
from hive.client import RefusedError, agent_options, ask
from hive.output import BAD, GOOD, QUIET, fact_lines, shown_as_document, terminal_width

HEALTHY = {"Ok", "Disabled"}
DONE = "Done"
_UNKNOWN = {"state": "Unknown", "msg": "the agent does not report its own state"}
SYNCED = ("nodes", "services", "endpoints", "identities")
"""Resources that are synchronized from a remote cluster."""
_COUNTS = (
    ("num-nodes", "nodes"),
    ("num-endpoints", "addresses"),
    ("num-identities", "identities"),
    ("num-shared-services", "services"),
)
PAUSE = 0.1
"""Polling interval in seconds while it waits."""


@click.command()
@agent_options
@click.option("--brief", is_flag=True, help="One line: OK, or the error.")
@click.option("--verbose", is_flag=True, help="Show also addresses, controllers and modules.")
@click.option(
    "--wait",
    "wanted",
    type=click.Choice(["ok", "degraded"]),
    help="Wait for this status, for at most --timeout seconds, then show it.",
)
def command(
    agent_socket: Path, timeout: float, output: str, brief: bool, verbose: bool, wanted: str | None
) -> None:
    """Show the status of the running agent. Exits 1 if it, or any part of it, is unhealthy."""
    headers = {"Brief": "true" if brief else "false"}
    answer = _answer(wanted, agent_socket, headers, timeout)
    if shown_as_document(answer, output):
        return
    wrong = worst_problem(answer)
    if brief:
        click.echo(f"error in {wrong}" if wrong else "OK")
    else:
        served = [*_served(answer, agent_socket, timeout), *_reached(answer, agent_socket, timeout)]
        facts = [(f"{name}:", text) for name, text in lines(answer, served, verbose=verbose)]
        for line in fact_lines(facts, terminal_width()):
            click.echo(line)
    if wrong:
        raise click.exceptions.Exit(1)


def _answer(wanted: str | None, agent_socket: Path, headers: dict[str, str], timeout: float) -> Any:
    """Wait for the requested status and return it. Raises click.ClickException after the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        late = left < PAUSE
        try:
            answer = ask("/v1/healthz", agent_socket, headers, max(left, PAUSE))
        except click.ClickException:  # not available yet, or busy
            if wanted != "ok" or late:
                raise
        else:
            if wanted is None or bool(worst_problem(answer)) == (wanted == "degraded"):
                return answer
            if late:
                raise click.ClickException(f"the agent is not {wanted} within {timeout:g} s")
        time.sleep(PAUSE)


def worst_problem(answer: dict[str, Any]) -> str:
    """Return what is wrong, the most severe first; empty if all is well. Texts are those of cilium-dbg."""
    state = answer.get("cilium") or _UNKNOWN
    if state["state"] not in HEALTHY:
        return f"cilium: {state.get('msg', state['state'])}"
    for probe, since in sorted((answer.get("stale") or {}).items()):
        return f"{probe}: does not answer since {since}"
    for one in _failing(answer.get("controllers") or []):
        return f"controller {one['name']}: {one['status'].get('last-failure-msg', 'failing')}"
    return ""


def _failing(controllers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in controllers if one.get("status", {}).get("consecutive-failure-count")]


def _served(answer: dict[str, Any], agent_socket: Path, timeout: float) -> Iterator[tuple[str, str]]:
    """Return the numbers of served objects; empty for other agents, such as Cilium's."""
    try:
        tables = ask("/statedb/tables", agent_socket, timeout=timeout)
        policies, proxies = (
            [row["obj"] for row in ask(f"/statedb/dump/{name}", agent_socket, timeout=timeout)[name]]
            for name in ("policies", "http-proxy")
        )
    except RefusedError as error:
        if error.status == NOT_FOUND:
            return
        raise
    rows = {one["name"]: one["rows"] for one in tables}
    conflicts = rows.get("service-conflicts", 0)
    wrong = f", {_count(conflicts, 'conflict')} (hive db show service-conflicts)" if conflicts else ""
    yield "Services", f"{_count(rows.get('frontends', 0), 'frontend')}{click.style(wrong, fg=BAD)}"
    yield "Policies", policies_text(policies)
    yield "Envoy", _envoy(proxies, rows.get("http-redirects", 0))
    if "modules" in answer:
        yield "DNS Proxy", _dns_proxy(answer["modules"])


def _reached(answer: dict[str, Any], agent_socket: Path, timeout: float) -> Iterator[tuple[str, str]]:
    """Return how many nodes answer probes; empty for an answer without details."""
    if "modules" not in answer:
        return
    socket = agent_socket.with_name("health.sock")
    if not socket.exists():
        yield "Cluster health", f"{click.style('Disabled', fg=QUIET)}   (enable-health-checking)"
        return
    try:
        nodes = ask("/v1beta/status", socket, timeout=timeout).get("nodes") or []
    except click.ClickException as error:
        yield "Cluster health", click.style(error.format_message(), fg=BAD)
        return
    if not nodes:
        yield "Cluster health", "no probes yet: the first round is not complete"
        return
    well = sum(node_state(one) == "reachable" for one in nodes)
    text = f"{well}/{len(nodes)} reachable"
    if well < len(nodes):
        text = f"{click.style(text, fg=BAD)}   (hive health)"
    yield "Cluster health", text


def policies_text(policies: list[dict[str, Any]]) -> str:
    """Return how many policies are in force as written, and how many are not."""
    refused = sum(1 for one in policies if one["refused"])
    unenforced = sum(
        1 for one in policies if not one["refused"] and (not one["valid"] or one.get("unenforced"))
    )
    text = f"{len(policies) - refused - unenforced} in force"
    wrong = [f"{refused} refused"] * bool(refused) + [f"{unenforced} not enforced as written"] * bool(
        unenforced
    )
    if wrong:
        text += click.style(f", {', '.join(wrong)} (hive policy list --refused)", fg=BAD)
    return text


def _envoy(proxies: list[dict[str, Any]], redirects: int) -> str:
    if not proxies:
        if redirects:
            return click.style("does not run: what HTTP rules select is dropped", fg=BAD)
        return f"{click.style('not in use', fg=QUIET)}   no policy here has rules for HTTP"
    proxy = proxies[0]
    if proxy["runs"] and not proxy["message"]:
        return f"{click.style('Ok', fg=GOOD)}   {_count(redirects, 'redirect')} to it"
    return click.style(proxy["message"] or "does not run: what HTTP rules select is dropped", fg=BAD)


def _dns_proxy(modules: list[dict[str, Any]]) -> str:
    ours = [one for one in modules if ".dns-proxy" in one["module-id"]]
    if not ours:
        return f"{click.style('Disabled', fg=QUIET)}   (enable-l7-proxy)"
    for one in ours:
        if one["level"] == "Degraded":
            return click.style(f"Degraded   {one.get('message', '')}", fg=BAD)
    return click.style("Ok", fg=GOOD)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def lines(
    answer: dict[str, Any], served: Iterable[tuple[str, str]] = (), *, verbose: bool
) -> Iterator[tuple[str, str]]:
    """Yield name and text of every line, for the parts that the agent reports; `served` among them."""
    yield from _around(answer)
    yield "Cilium", _state(answer.get("cilium") or _UNKNOWN)
    yield from _watching(answer)
    if "ipam" in answer:
        yield "IPAM", str(answer["ipam"].get("status", "")).rstrip(", ")
        if verbose:
            for address, owner in sorted((answer["ipam"].get("allocations") or {}).items()):
                yield "  allocated", f"{address} ({owner})"
    yield from _datapath(answer)
    yield from _enabled_features(answer, verbose=verbose)
    if (nodes := answer.get("cluster", {}).get("nodes")) is not None:
        yield "Nodes", f"{len(nodes)} known, this one is {answer['cluster'].get('self', '')}"
    yield from _clusters(answer.get("cluster-mesh"), verbose=verbose)
    yield from served
    if proxy := answer.get("proxy"):
        yield "Proxy Status", _proxy(proxy)
        if verbose:
            for one in proxy.get("redirects") or ():
                yield f"  {one.get('name', '')}", f"{one.get('proxy', '')} on port {one.get('proxy-port', 0)}"
    yield from _controllers(answer.get("controllers"), verbose=verbose)
    yield from _modules(answer.get("modules"), verbose=verbose)
    if "identity-range" in answer:
        identities = answer["identity-range"]
        yield "Global Identity Range", f"min {identities['min-identity']}, max {identities['max-identity']}"
    if verbose:
        yield from _services_in_detail(answer.get("kube-proxy-replacement") or {})
        yield from _maps(answer.get("bpf-maps") or {})


def _clusters(mesh: dict[str, Any] | None, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Return how many remote clusters are ready, and why others are not; with ``verbose`` their details."""
    if mesh is None:
        return
    clusters = mesh.get("clusters") or ()
    ready = sum(bool(one.get("ready")) for one in clusters)
    text = f"{ready}/{len(clusters)} remote clusters ready"
    shared = _count(mesh.get("num-global-services", 0), "global service")
    yield "ClusterMesh", f"{click.style(text, fg=BAD) if ready < len(clusters) else text}   {shared}"
    for one in clusters:
        if one.get("ready") and not verbose:
            continue
        lacking = [kind for kind in SYNCED if not (one.get("synced") or {}).get(kind)]
        parts = [one.get("status", "")]
        if one.get("connected") and not (one.get("config") or {}).get("retrieved"):
            parts.append("no configuration of the cluster yet")
        elif one.get("connected") and lacking:
            parts.append(f"not listed yet: {', '.join(lacking)}")
        if verbose:
            parts += [f"{one.get(key, 0)} {what}" for key, what in _COUNTS]
        if failures := one.get("num-failures", 0):
            parts.append(f"{_count(failures, 'reconnection')}")
        state = click.style("Ready", fg=GOOD) if one.get("ready") else click.style("Not ready", fg=BAD)
        yield f"  {one.get('name', '')}", f"{state}   {', '.join(filter(None, parts))}"


def _around(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines about the agent's dependencies, and its coexistence with other programs."""
    for key, name in (
        ("kvstore", "KVStore"),
        ("container-runtime", "ContainerRuntime"),
        ("kubernetes", "Kubernetes"),
    ):
        if key in answer:
            yield name, _state(answer[key])
    if "kube-proxy-replacement" in answer:
        yield "KubeProxyReplacement", _replacement(answer["kube-proxy-replacement"])
    if "host-firewall" in answer:
        yield "Host firewall", _at_devices(answer["host-firewall"])
    if "cni-chaining" in answer:
        yield "CNI Chaining", answer["cni-chaining"].get("mode", "none")
    if "cni-file" in answer:
        yield "CNI Config file", answer["cni-file"].get("msg") or _state(answer["cni-file"])


def _replacement(found: dict[str, Any]) -> str:
    """Return whether kube-proxy is replaced, on which devices, and which features are enabled."""
    on = found.get("mode") == "True"
    devices = [
        f"{one['name']} {' '.join(one.get('ip') or ())}".rstrip() for one in found.get("deviceList") or ()
    ]
    if not on:
        return f"{click.style('False', fg=QUIET)}   kube-proxy serves services outside of pods"
    features = found.get("features") or {}
    parts = []
    if (ports := features.get("nodePort", {})).get("enabled"):
        parts.append(
            f"node ports {ports['portMin']}-{ports['portMax']} ({ports['mode']}, {ports['algorithm']})"
        )
    parts += ["sockets"] * bool(features.get("socketLB", {}).get("enabled"))
    return f"True   [{', '.join(devices)}]   {', '.join(parts)}".rstrip()


def _at_devices(found: dict[str, Any]) -> str:
    """Return whether a feature is active, and on which devices."""
    if found.get("mode", "Disabled") == "Disabled":
        return click.style("Disabled", fg=QUIET)
    return f"{found['mode']}   [{', '.join(found.get('devices') or ())}]"


def _watching(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for probe, since in sorted((answer.get("stale") or {}).items()):
        yield "Stale status", click.style(f"{probe} does not answer since {since}", fg=BAD)
    if monitor := answer.get("nodeMonitor"):
        ring = f"{monitor['npages']} pages of {monitor['pagesize']} bytes"
        yield "NodeMonitor", f"Events of {monitor['cpus']} CPUs, {ring} each"
    if hubble := answer.get("hubble"):
        yield "Hubble", _hubble(hubble)


def _hubble(hubble: dict[str, Any]) -> str:
    """Return whether the agent stores flows, and how many."""
    if not (observer := hubble.get("observer")):
        return _state(hubble)
    current, most = observer.get("current-flows", 0), observer["max-flows"]
    return f"{_state(hubble)}   {current}/{most} flows stored, {observer.get('seen-flows', 0)} seen"


def _datapath(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "routing" in answer:
        routing = answer["routing"]
        network = routing.get("inter-host-routing-mode", "")
        tunnel = f" [{routing['tunnel-protocol']}]" if routing.get("tunnel-protocol") else ""
        yield "Routing", f"Network: {network}{tunnel}   Host: {routing.get('intra-host-routing-mode', '')}"
    if "attach-mode" in answer:
        yield (
            "Attach Mode",
            {"tc": "Legacy TC", "tcx": "TCX"}.get(answer["attach-mode"], answer["attach-mode"]),
        )
    if "datapath-mode" in answer:
        yield "Device Mode", answer["datapath-mode"]
    if "masquerading" in answer:
        masquerading = answer["masquerading"]
        yield (
            "Masquerading",
            masquerading_text(masquerading) if masquerading.get("enabled") else "Disabled",
        )


def _enabled_features(answer: dict[str, Any], *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Return the features enabled in addition to the defaults; with ``verbose`` also the disabled ones."""
    if (encryption := answer.get("encryption")) and (verbose or encryption.get("mode") != "Disabled"):
        yield "Encryption", _encryption(encryption)
    for family in (4, 6):
        big = answer.get(f"ipv{family}-big-tcp") or {}
        if big.get("enabled"):
            yield f"IPv{family} BIG TCP", f"Enabled   [{big.get('maxGRO', 0)}, {big.get('maxGSO', 0)}]"
        elif big and verbose:
            yield f"IPv{family} BIG TCP", click.style("Disabled", fg=QUIET)
    bandwidth = answer.get("bandwidth-manager") or {}
    if bandwidth.get("enabled"):
        control = str(bandwidth.get("congestionControl", "")).upper()
        yield "BandwidthManager", f"EDT with BPF [{control}]   [{', '.join(bandwidth.get('devices') or ())}]"
    elif bandwidth and verbose:
        yield "BandwidthManager", click.style("Disabled", fg=QUIET)
    if verbose and (clock := answer.get("clock-source")):
        hertz = f"   [{clock.get('hertz', 0)} Hz]" if clock.get("mode") == "jiffies" else ""
        yield "Clock Source for BPF", f"{clock.get('mode', '')}{hertz}"


def _encryption(found: dict[str, Any]) -> str:
    """Return the mode, and for WireGuard the interfaces with their peers."""
    if found.get("mode") == "Disabled":
        return click.style("Disabled", fg=QUIET)
    wireguard = found.get("wireguard") or {}
    parts = [
        f"{one.get('name', '')} port {one.get('listen-port', 0)}, {_count(one.get('peer-count', 0), 'peer')}"
        for one in wireguard.get("interfaces") or ()
    ]
    if wireguard:
        parts.insert(0, f"of nodes: {wireguard.get('node-encryption', '')}")
    return f"{found.get('mode', '')}   {'; '.join(parts)}".rstrip()


def _proxy(proxy: dict[str, Any]) -> str:
    """Return the redirects to proxies."""
    count = _count(proxy.get("total-redirects", 0), "redirect")
    envoy = proxy.get("envoy-deployment-mode", "")
    return f"{count} on ports {proxy.get('port-range', '')}" + (f", Envoy: {envoy}" if envoy else "")


def _services_in_detail(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the features of services in the datapath."""
    features = found.get("features") or {}
    if not features:
        return
    yield "Services in detail", ""
    names = (
        ("socketLB", "socket LB"),
        ("sessionAffinity", "session affinity"),
        ("gracefulTermination", "graceful termination"),
        ("nodePort", "node ports"),
        ("hostPort", "host ports"),
        ("externalIPs", "external IPs"),
    )
    for key, name in names:
        on = bool((features.get(key) or {}).get("enabled"))
        text = click.style("Enabled", fg=GOOD) if on else click.style("Disabled", fg=QUIET)
        if on and key == "nodePort":
            one = features[key]
            xdp = one.get("acceleration", "Disabled")
            text += f"   {one['portMin']}-{one['portMax']}, {one['mode']}, {one['algorithm']}, XDP {xdp}"
        yield f"  {name}", text


def _maps(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the sizes of maps."""
    if not (maps := found.get("maps") or ()):
        return
    ratio = found.get("dynamic-size-ratio") or 0
    yield "BPF maps", f"sized by memory, ratio {ratio:g}" if ratio else "sized by settings"
    for one in maps:
        yield f"  {one['name']}", f"{one['size']} entries"


def masquerading_text(masquerading: dict[str, Any]) -> str:
    """Return the mode of masquerading, its families, and excluded destinations."""
    families = masquerading.get("enabledProtocols", {})
    on = " and ".join(text for name, text in (("ipv4", "IPv4"), ("ipv6", "IPv6")) if families.get(name))
    networks = [masquerading.get(f"snat-exclusion-cidr-{name}") for name in ("v4", "v6")]
    excluded = ", ".join(each for each in networks if each)
    mode = str(masquerading.get("mode", "Enabled"))
    return mode + (f" ({on})" if on else "") + (f", not to {excluded}" if excluded else "")


def _controllers(controllers: list[dict[str, Any]] | None, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if controllers is None:
        return
    failing = _failing(controllers)
    count = f"{len(controllers) - len(failing)}/{len(controllers)} healthy"
    yield "Controller Status", click.style(count, fg=BAD if failing else None)
    for one in controllers if verbose else failing:
        counts = one.get("status", {})
        if one in failing:
            text = click.style(counts.get("last-failure-msg", "failing"), fg=BAD)
        else:
            text = _runs(counts.get("success-count", 0), counts.get("failure-count", 0))
        yield f"  {one['name']}", text


def _runs(worked: int, failed: int) -> str:
    if not worked + failed:
        return "no run has ended yet"
    return f"{worked} run{'' if worked == 1 else 's'}" + (f", {failed} failed before" if failed else "")


def _modules(modules: list[dict[str, Any]] | None, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if modules is None:
        return
    levels = Counter(_level(one) for one in modules)
    counts = " ".join(f"{level}({levels[level]})" for level in ("Stopped", "Degraded", "OK"))
    done = f"   {_count(levels[DONE], 'job')} done" if levels[DONE] else ""
    yield "Modules Health", f"{counts}{done}"
    for one in modules:
        level = _level(one)
        if not verbose and level != "Degraded":
            continue
        colour = {"OK": GOOD, "Degraded": BAD}.get(level, QUIET)
        text = "" if level == DONE else one.get("message", "")
        yield f"  {one['module-id']}", f"{click.style(level, fg=colour)}   {text}"


def _level(module: dict[str, Any]) -> str:
    """Return the level of health; for a finished job, that."""
    return DONE if (module["level"], module.get("message")) == ("Stopped", "done") else str(module["level"])


def _state(status: dict[str, Any]) -> str:
    state, text = status.get("state", "Unknown"), status.get("msg") or ""
    colour = {"Ok": GOOD, "Disabled": QUIET}.get(state, BAD)
    return f"{click.style(state, fg=colour)}   {text}".rstrip()
