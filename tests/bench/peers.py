"""Peer networks in namespaces, created and removed here."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from hive.lab.namespaces import Namespaces


class Pair(NamedTuple):
    """Two connected pods: their network namespaces, and the server's address."""

    client: Namespaces
    server: Namespaces
    address: str


def ip(*words: str, netns: str | None = None) -> None:
    """Run iproute2's ``ip``; its error ends the benchmark."""
    where = ["-netns", netns] if netns else []
    subprocess.run(["ip", *where, *words], check=True, timeout=30)


def inside(netns: str, *command: str, text: str | None = None) -> str:
    """Run a command in a named namespace and return its output."""
    full = ["ip", "netns", "exec", netns, *command]
    return subprocess.run(full, check=True, timeout=60, input=text, capture_output=True, text=True).stdout


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Create named network namespaces for the block, with loopback up."""
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            ip("link", "set", "lo", "up", netns=name)
        yield
    finally:
        for name in made:
            ip("netns", "del", name)


@contextlib.contextmanager
def pair(prefix: str) -> Iterator[Pair]:
    """Return the two pods of a peer network, by convention of names."""
    with (
        Namespaces.open(f"/run/netns/{prefix}-a") as client,
        Namespaces.open(f"/run/netns/{prefix}-b") as server,
    ):
        yield Pair(client, server, "10.201.0.12")


def veth(prefix: str, pod: str) -> None:
    """Create a pair between the node and a pod: ``veth-<pod>`` and ``eth0``."""
    node = f"{prefix}-node"
    ip(
        "link",
        "add",
        f"veth-{pod}",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        f"{prefix}-{pod}",
        netns=node,
    )
    ip("link", "set", f"veth-{pod}", "up", netns=node)
    ip("link", "set", "eth0", "up", netns=f"{prefix}-{pod}")


@contextlib.contextmanager
def bridge(prefix: str = "bench-bridge") -> Iterator[Pair]:
    """Connect two pods by a plain bridge: no policy, no address checks."""
    node = f"{prefix}-node"
    with namespaces(node, f"{prefix}-a", f"{prefix}-b"):
        ip("link", "add", "br0", "type", "bridge", netns=node)
        ip("link", "set", "br0", "up", netns=node)
        for pod, address in (("a", "10.201.0.11/24"), ("b", "10.201.0.12/24")):
            veth(prefix, pod)
            ip("link", "set", f"veth-{pod}", "master", "br0", netns=node)
            ip("addr", "add", address, "dev", "eth0", netns=f"{prefix}-{pod}")
        with pair(prefix) as pods:
            yield pods


@contextlib.contextmanager
def routed(prefix: str = "bench-routed") -> Iterator[Pair]:
    """Connect two pods by a route each on the node, as most routing CNIs do: no policy."""
    node = f"{prefix}-node"
    gateway = "169.254.1.1"
    with namespaces(node, f"{prefix}-a", f"{prefix}-b"):
        inside(node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for pod, address in (("a", "10.201.0.11"), ("b", "10.201.0.12")):
            name = f"{prefix}-{pod}"
            veth(prefix, pod)
            ip("addr", "add", f"{gateway}/32", "dev", f"veth-{pod}", netns=node)
            ip("route", "add", f"{address}/32", "dev", f"veth-{pod}", netns=node)
            ip("addr", "add", f"{address}/32", "dev", "eth0", netns=name)
            ip("route", "add", gateway, "dev", "eth0", "scope", "link", netns=name)
            ip("route", "add", "default", "via", gateway, netns=name)
        with pair(prefix) as pods:
            yield pods


# The same work as ours: a source check on every packet, conntrack, per-pod rules for what is new.
RULES = """
table ip pods {
    chain forward {
        type filter hook forward priority filter; policy drop;
        iifname "veth-a" ip saddr != 10.201.0.11 drop
        iifname "veth-b" ip saddr != 10.201.0.12 drop
        ct state established,related accept
        ct state invalid drop
        iifname vmap { "veth-a" : jump from-a, "veth-b" : jump from-b }
        oifname vmap { "veth-a" : goto to-a, "veth-b" : goto to-b }
    }
    chain from-a { ip daddr 10.201.0.12 tcp dport 1024-65535 return; drop; }
    chain from-b { ip daddr 10.201.0.11 tcp dport 1024-65535 return; drop; }
    chain to-a { ip saddr 10.201.0.12 tcp dport 1024-65535 accept; drop; }
    chain to-b { ip saddr 10.201.0.11 tcp dport 1024-65535 accept; drop; }
}
"""


@contextlib.contextmanager
def filtered() -> Iterator[Pair]:
    """Add nftables conntrack and rules for each pod to the routed pair: the same checks as ours."""
    prefix = "bench-nft"
    with routed(prefix) as pods:
        inside(f"{prefix}-node", "nft", "-f", "-", text=RULES)
        yield pods
