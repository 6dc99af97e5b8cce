"""kube-proxy's rules on a node that serves clients outside: reported, and not changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hive.lab import agent_process
from hive.lab.node import Lab
from tests.node.agent.netfilter import IPTABLES, looked, run
from tests.support.agents import serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NFTABLES = """
table ip kube-proxy {
    chain services { }
    chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
}
"""
OTHERS = """
table ip somebody {
    chain forward { type filter hook forward priority 0; accept; }
}
"""
LEGACY = "*filter\n-A FORWARD -p tcp --dport 25 -j ACCEPT\nCOMMIT\n*mangle\nCOMMIT\n"
"""A rule of another program, and a table without any."""


def rules() -> list[str]:
    nft = run("", "nft", "list", "ruleset")
    legacy = run("", "iptables-legacy-save")
    return [line for line in f"{nft}{legacy}".splitlines() if not line.startswith(("#", ":"))]


def reported_of_others(log: str) -> set[str]:
    """Where the last agent found rules that are not kube-proxy's."""
    lines = [line for line in log.splitlines() if "netfilter rules of other programs found" in line]
    return set(lines[-1].partition('found="')[2].rstrip('"').split(", ")) if lines else set()


def test_rules_of_kube_proxy_are_reported_and_unchanged(node: Lab) -> None:
    def agent() -> str:
        pid = serving(node, "--enable-node-port=true")
        eventually(lambda: looked(pid))
        assert terminated(node, pid) == 0
        return agent_process.log_end(node, 1000)

    def there(check: Callable[[], list[str]], before: list[str]) -> bool:
        with node.open() as inside:
            return inside.run(check) == before

    with node.open() as inside:
        inside.run(run, OTHERS, "nft", "-f", "-")
        inside.run(run, LEGACY, "iptables-legacy-restore", "--noflush")
        before = inside.run(rules)
    log = agent()
    assert "rules of kube-proxy" not in log
    assert reported_of_others(log) == {"nftables ip somebody", "iptables-legacy ip filter"}
    assert there(rules, before)
    with node.open() as inside:
        inside.run(run, NFTABLES, "nft", "-f", "-")
        for kind in ("nft", "legacy"):
            inside.run(run, IPTABLES, f"iptables-{kind}-restore", "--noflush")
        before = inside.run(rules)
    log = agent()
    for kind in ("nftables (ip)", "iptables-nft (ip)", "iptables-legacy (ip)"):
        assert kind in log
    assert reported_of_others(log) == {"nftables ip somebody", "iptables-legacy ip filter"}
    assert there(rules, before)
