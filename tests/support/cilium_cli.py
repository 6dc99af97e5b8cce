"""What ``cilium`` (cilium-cli 0.16 and 0.18) runs in an agent's pod, and how it reads what that prints.

Command lines are those of its ``status``, ``connectivity test``, ``bgp``, ``multicast`` and ``sysdump``. The
same list runs beside an agent and in the pod of the image.

Source: cilium/cilium, cilium-cli/ (connectivity/check, connectivity/tests, bgp, sysdump, k8s).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

EXPECTED_DROPS: Final = (
    *("Policy denied", "Policy denied by denylist", "Unsupported L3 protocol", "Stale or unroutable IP"),
    *("Authentication required", "Service backend not found", "Unsupported protocol for NAT masquerade"),
    *("Invalid source ip", "Unknown L3 target address", "No tunnel/encapsulation endpoint (datapath BUG!)"),
    *("Host datapath not ready", "Unknown ICMPv4 code", "Forbidden ICMPv6 message", "No node ID found"),
)
"""Drop reasons that its tests accept."""


class Exec(NamedTuple):
    """One command that cilium-cli runs in the pod."""

    words: tuple[str, ...]
    reads: Callable[[str], object]
    """Parses the output; raises or returns something false if the output is not as expected."""
    terminal: bool = False
    """Whether it runs with a terminal, so that lines end with a carriage return."""


def _drops(condition: str) -> tuple[str, ...]:
    query = f'.[] | select((.name == "cilium_drop_count_total") and ({condition}))'
    return ("/bin/sh", "-c", f"cilium metrics list -o json | jq '{query}'")


def _healthy(printed: str) -> bool:
    """Check the output as cilium-cli's health test: every node is listed, and no path has an error."""
    nodes = json.loads(printed)["nodes"]
    return bool(nodes) and not [text for one in nodes for text in _complaints(one)]


def _complaints(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("status"):
            yield value["status"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _complaints(one)


def _is_jsonpb(printed: str) -> bool:
    return all({"flow", "time"} <= json.loads(line).keys() for line in printed.splitlines())


def _is_empty_list(printed: str) -> bool:
    return bool(json.loads(printed) == [])


def _is_revision(printed: str) -> bool:
    return int(printed.strip("'\r\n")) > 0


def _has_world(printed: str) -> bool:
    return "0.0.0.0/0" in json.loads(printed)


def _is_version(printed: str) -> bool:
    return re.fullmatch(r"1\.17\.\d+\S*", printed.strip()) is not None


HEALTH: Final = Exec(("cilium-health", "status", "--probe", "-o=json"), _healthy, terminal=True)
"""Repeated once a second until it succeeds."""

ADDRESSES: Final = "ip -family inet -oneline address show dev lo scope host | awk '{print $4}' | cut -d/ -f1"
FLOWS: Final = "hubble observe --last 10000 --debug -o jsonpb 2>/dev/null"

EXECS: Final = (
    Exec(("cilium", "bgp", "peers", "-o", "json"), _is_empty_list),
    Exec(("cilium", "bgp", "routes", "available", "ipv4", "unicast", "-o", "json"), _is_empty_list),
    Exec(("cilium", "bgp", "routes", "advertised", "ipv6", "unicast", "-o", "json"), _is_empty_list),
    Exec(_drops(f".labels.reason | IN({json.dumps(EXPECTED_DROPS)[1:-1]}) | not"), lambda found: not found),
    Exec(_drops('.labels.reason == "Missed tail call"'), lambda printed: not printed),
    Exec(("/bin/sh", "-c", ADDRESSES), lambda printed: printed == "127.0.0.1\n"),
    Exec(("ip", "-o", "route", "get", "127.0.0.1"), lambda printed: "dev lo" in printed),
    Exec(("bpftool", "--json", "map", "list", "name", "cilium_ipcache"), json.loads),
    Exec(("cilium", "bpf", "egress", "list", "-o", "json"), lambda printed: json.loads(printed) is not None),
    Exec(("hubble", "status"), lambda printed: "Current/Max Flows" in printed),
    Exec(("hubble", "observe", "--last", "5", "-o", "jsonpb"), _is_jsonpb),
    Exec(("timeout", "--signal", "SIGINT", "--preserve-status", "5", "bash", "-c", FLOWS), _is_jsonpb),
    Exec(("ls", "/etc/cni/net.d"), str.split),
    Exec(("cilium", "policy", "get", "-o", "jsonpath='{.revision}'"), _is_revision, terminal=True),
    Exec(("cilium", "bpf", "ipcache", "list", "-o", "json"), _has_world, terminal=True),
    Exec(("cilium", "version", "-o", "jsonpath={$.Daemon.Version}"), _is_version, terminal=True),
)
"""Commands that succeed at the first call."""

MULTICAST: Final = ("cilium-dbg", "bpf", "multicast", "group", "list")
"""Fails: multicast is not built."""


def sysdump(run: Callable[..., bytes]) -> list[str]:
    """Return the names of files in the archive that a sysdump copies by `run` and removes there."""
    printed = run("cilium-bugtool", "--archiveType=gz", "--exclude-object-files").decode()
    found = re.search(r"GZIP at (.*)\n", printed)
    assert found is not None, printed
    path = found[1]
    try:
        size = int(run("stat", "-c", "%s", path))
        half = size // 2
        whole = run("sh", "-c", f"tail -c+1 {path}")
        assert len(whole) == size
        assert run("sh", "-c", f"tail -c+{half + 1} {path}") == whole[half:], (
            "a copy goes on where it broke off"
        )
    finally:
        run("rm", path)
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:gz") as opened:
        return opened.getnames()
