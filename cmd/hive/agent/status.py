"""``hive status``: how the running agent is, line by line as operators know it.

Needs: the agent's GET /v1/healthz.   Gives: command.   Source of the lines: cilium-dbg status.
"""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hive.client import ask, socket_option, timeout_option
from hive.output import BAD, GOOD, QUIET, document, fact_lines, output_option, terminal_width

HEALTHY = {"Ok", "Disabled"}
PAUSE = 0.1
"""Seconds between two questions while it waits."""


@click.command()
@socket_option
@timeout_option
@output_option
@click.option("--brief", is_flag=True, help="One line: OK, or what is wrong.")
@click.option("--verbose", is_flag=True, help="Also all addresses, controllers and modules.")
@click.option(
    "--wait",
    "wanted",
    type=click.Choice(["ok", "degraded"]),
    help="Wait until it is so, for --timeout seconds at most, and show it then.",
)
def command(
    agent_socket: Path, timeout: float, output: str, brief: bool, verbose: bool, wanted: str | None
) -> None:
    """Show the status of the running agent. Exits 1 if it, or any part of it, is unhealthy."""
    headers = {"Brief": "true" if brief else "false"}
    answer = _answer(wanted, agent_socket, headers, timeout)
    if (text := document(answer, output)) is not None:
        click.echo(text)
        return
    wrong = trouble(answer)
    if brief:
        click.echo(f"error in {wrong}" if wrong else "OK")
    else:
        facts = [(f"{name}:", text) for name, text in lines(answer, verbose=verbose)]
        for line in fact_lines(facts, terminal_width()):
            click.echo(line)
    if wrong:
        raise click.exceptions.Exit(1)


def _answer(wanted: str | None, agent_socket: Path, headers: dict[str, str], timeout: float) -> Any:
    """What the agent answers once it is as wanted. Raises click.ClickException when it does not get so."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        late = left < PAUSE
        try:
            answer = ask("/v1/healthz", agent_socket, headers, max(left, PAUSE))
        except click.ClickException:  # not there yet, or busy
            if wanted != "ok" or late:
                raise
        else:
            if wanted is None or bool(trouble(answer)) == (wanted == "degraded"):
                return answer
            if late:
                raise click.ClickException(f"the agent is not {wanted} within {timeout:g} s")
        time.sleep(PAUSE)


def trouble(answer: dict[str, Any]) -> str:
    """What is wrong, the gravest first; nothing when all is well. The words are those of cilium-dbg."""
    state = answer["cilium"]
    if state["state"] not in HEALTHY:
        return f"cilium: {state.get('msg', state['state'])}"
    for probe, since in sorted((answer.get("stale") or {}).items()):
        return f"{probe}: does not answer since {since}"
    for one in _failing(answer.get("controllers") or []):
        return f"controller {one['name']}: {one['status'].get('last-failure-msg', 'failing')}"
    return ""


def _failing(controllers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in controllers if one.get("status", {}).get("consecutive-failure-count")]


def lines(answer: dict[str, Any], *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Name and text of every line, for the parts the agent reports."""
    for key, name in (
        ("kvstore", "KVStore"),
        ("container-runtime", "ContainerRuntime"),
        ("kubernetes", "Kubernetes"),
    ):
        if key in answer:
            yield name, _state(answer[key])
    if "cni-chaining" in answer:
        yield "CNI Chaining", answer["cni-chaining"].get("mode", "none")
    if "cni-file" in answer:
        yield "CNI Config file", answer["cni-file"].get("msg") or _state(answer["cni-file"])
    yield "Cilium", _state(answer["cilium"])
    yield from _watching(answer)
    if "ipam" in answer:
        yield "IPAM", str(answer["ipam"].get("status", "")).rstrip(", ")
        if verbose:
            for address, owner in sorted((answer["ipam"].get("allocations") or {}).items()):
                yield "  allocated", f"{address} ({owner})"
    yield from _datapath(answer)
    yield from _controllers(answer.get("controllers"), verbose=verbose)
    yield from _modules(answer.get("modules"), verbose=verbose)
    if "identity-range" in answer:
        identities = answer["identity-range"]
        yield "Global Identity Range", f"min {identities['min-identity']}, max {identities['max-identity']}"


def _watching(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for probe, since in sorted((answer.get("stale") or {}).items()):
        yield "Stale status", click.style(f"{probe} does not answer since {since}", fg=BAD)
    if monitor := answer.get("nodeMonitor"):
        ring = f"{monitor['npages']} pages of {monitor['pagesize']} bytes"
        yield "NodeMonitor", f"Events of {monitor['cpus']} CPUs, {ring} each"


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


def masquerading_text(masquerading: dict[str, Any]) -> str:
    """How, for which families, and to where not."""
    families = masquerading.get("enabledProtocols", {})
    on = " and ".join(text for name, text in (("ipv4", "IPv4"), ("ipv6", "IPv6")) if families.get(name))
    networks = [masquerading.get(f"snat-exclusion-cidr-{name}") for name in ("v4", "v6")]
    kept = ", ".join(each for each in networks if each)
    mode = str(masquerading.get("mode", "Enabled"))
    return mode + (f" ({on})" if on else "") + (f", not to {kept}" if kept else "")


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
    levels = Counter(one["level"] for one in modules)
    yield "Modules Health", " ".join(f"{level}({levels[level]})" for level in ("Stopped", "Degraded", "OK"))
    for one in modules:
        if not verbose and one["level"] != "Degraded":
            continue
        colour = {"OK": GOOD, "Degraded": BAD}.get(one["level"], QUIET)
        yield f"  {one['module-id']}", f"{click.style(one['level'], fg=colour)}   {one.get('message', '')}"


def _state(status: dict[str, Any]) -> str:
    state, text = status.get("state", "Unknown"), status.get("msg") or ""
    colour = {"Ok": GOOD, "Disabled": QUIET}.get(state, BAD)
    return f"{click.style(state, fg=colour)}   {text}".rstrip()
