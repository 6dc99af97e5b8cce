"""Services as kube-proxy's rules of nftables and iptables, and as objects.

Source: kube-proxy, pkg/proxy/nftables and pkg/proxy/iptables: one map or one chain for all services, a chain
for each service and one for each of its backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

PORT, TARGET = 80, 8080
BACKENDS = 10
NODE_PORT = 30080


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """Services of BACKENDS backends; the one in the middle leads to ``target`` from ``port`` on."""

    services: int
    target: str = ""
    port: int = 0
    node: str = ""
    """The node port's address of the service in the middle, if it has one."""

    @property
    def middle(self) -> int:
        """Return the number of the measured service."""
        return self.services // 2

    @property
    def asked(self) -> str:
        """Return its address."""
        return vip(self.middle)

    def backends(self, number: int) -> list[tuple[str, int]]:
        """Return the backends of a service."""
        if number == self.middle and self.target:
            return [(self.target, self.port + each) for each in range(BACKENDS)]
        first = IPv4Address("11.0.0.1") + BACKENDS * number
        return [(str(first + each), TARGET) for each in range(BACKENDS)]


def vip(number: int) -> str:
    """Return the address of a service."""
    return str(IPv4Address("10.96.0.1") + number)


def nft_rules(load: ServiceLoad) -> str:
    """Return the whole table."""
    ids = range(load.services)
    ports = ""
    if load.node:
        ports = f"tcp . {NODE_PORT} : goto service-{load.middle}"
    return "\n".join(
        [
            "table ip kube-proxy",
            "delete table ip kube-proxy",
            "table ip kube-proxy {",
            "map service-ips { type ipv4_addr . inet_proto . inet_service : verdict;",
            f"elements = {{ {', '.join(f'{vip(i)} . tcp . {PORT} : goto service-{i}' for i in ids)} }} }}",
            "map service-nodeports { type inet_proto . inet_service : verdict;",
            f"elements = {{ {ports} }} }}" if ports else "}",
            f"set nodeport-ips {{ type ipv4_addr; elements = {{ {load.node or '127.0.0.1'} }} }}",
            "chain mark-for-masquerade { meta mark set meta mark or 0x4000; }",
            *(line for i in ids for line in _nft_service(load, i)),
            "chain services {",
            "ip daddr . meta l4proto . th dport vmap @service-ips",
            "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports",
            "}",
            "chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }",
            "chain nat-output { type nat hook output priority -100; jump services; }",
            (
                "chain nat-postrouting { type nat hook postrouting priority srcnat;"
                " meta mark and 0x4000 == 0 return;"
                " meta mark set meta mark xor 0x4000; masquerade fully-random; }"
            ),
            "}",
        ]
    )


def _nft_service(load: ServiceLoad, number: int) -> Iterator[str]:
    backends = load.backends(number)
    for at, (ip, port) in enumerate(backends):
        yield f"chain endpoint-{number}-{at} {{ {_nft_backend(ip, port)}; }}"
    yield f"chain service-{number} {{ {_nft_choice(number, range(len(backends)))}; }}"


def _nft_backend(ip: str, port: int) -> str:
    return f"ip saddr {ip} jump mark-for-masquerade; meta l4proto tcp dnat to {ip}:{port}"


def _nft_choice(number: int, backends: Iterable[int]) -> str:
    choices = [f"{turn} : goto endpoint-{number}-{at}" for turn, at in enumerate(backends)]
    return f"numgen random mod {len(choices)} vmap {{ {', '.join(choices)} }}"


def nft_change(load: ServiceLoad, number: int, turn: int) -> str:
    """Return the replacement of one backend of a service, as kube-proxy writes it, for each turn."""
    ip, name = str(IPv4Address("12.0.0.1") + turn), f"endpoint-{number}-new-{turn}"
    rest = [f"{at} : goto endpoint-{number}-{at}" for at in range(1, BACKENDS)]
    before = f"endpoint-{number}-new-{turn - 1}" if turn else f"endpoint-{number}-0"
    return "\n".join(
        [
            f"add chain ip kube-proxy {name}",
            f"add rule ip kube-proxy {name} ip saddr {ip} jump mark-for-masquerade",
            f"add rule ip kube-proxy {name} meta l4proto tcp dnat to {ip}:{TARGET}",
            f"flush chain ip kube-proxy service-{number}",
            (
                f"add rule ip kube-proxy service-{number} numgen random mod {BACKENDS}"
                f" vmap {{ 0 : goto {name}, {', '.join(rest)} }}"
            ),
            f"flush chain ip kube-proxy {before}",
            f"delete chain ip kube-proxy {before}",
        ]
    )


def iptables_rules(load: ServiceLoad) -> str:
    """Return the whole nat table."""
    ids = range(load.services)
    node_port = [f"-A KUBE-NODEPORTS -p tcp -m tcp --dport {NODE_PORT} -j KUBE-SVC-{load.middle}"]
    return "\n".join(
        [
            "*nat",
            ":KUBE-SERVICES - [0:0]",
            ":KUBE-NODEPORTS - [0:0]",
            ":KUBE-MARK-MASQ - [0:0]",
            ":KUBE-POSTROUTING - [0:0]",
            *(line for i in ids for line in _chains(i)),
            "-A PREROUTING -j KUBE-SERVICES",
            "-A OUTPUT -j KUBE-SERVICES",
            "-A POSTROUTING -j KUBE-POSTROUTING",
            "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000",
            "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
            "-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000",
            "-A KUBE-POSTROUTING -j MASQUERADE --random-fully",
            *(f"-A KUBE-SERVICES -d {vip(i)}/32 -p tcp -m tcp --dport {PORT} -j KUBE-SVC-{i}" for i in ids),
            "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
            *(node_port if load.node else ()),
            *(line for i in ids for line in _iptables_service(i, load.backends(i))),
            "COMMIT",
            "",
        ]
    )


def _chains(number: int) -> Iterator[str]:
    yield f":KUBE-SVC-{number} - [0:0]"
    for at in range(BACKENDS):
        yield f":KUBE-SEP-{number}-{at} - [0:0]"


def _iptables_service(number: int, backends: list[tuple[str, int]]) -> Iterator[str]:
    for at, (ip, port) in enumerate(backends):
        left = len(backends) - at
        chance = f" -m statistic --mode random --probability {1 / left:.10f}" if left > 1 else ""
        yield f"-A KUBE-SVC-{number}{chance} -j KUBE-SEP-{number}-{at}"
        yield f"-A KUBE-SEP-{number}-{at} -s {ip}/32 -j KUBE-MARK-MASQ"
        yield f"-A KUBE-SEP-{number}-{at} -p tcp -m tcp -j DNAT --to-destination {ip}:{port}"


def iptables_change(load: ServiceLoad, number: int, turn: int) -> str:
    """Return the same change; the remaining table is not sent again (``--noflush``)."""
    backends = [(str(IPv4Address("12.0.0.1") + turn), TARGET), *load.backends(number)[1:]]
    return "\n".join(["*nat", *_chains(number), *_iptables_service(number, backends), "COMMIT", ""])


def manifests(load: ServiceLoad) -> str:
    """Return services and their slices, in few lines."""
    found = []
    for number in range(load.services):
        backends = load.backends(number)
        kind = f"type: NodePort, ports: [{{name: http, port: {PORT}, nodePort: {NODE_PORT}}}]"
        if number != load.middle or not load.node:
            kind = f"ports: [{{name: http, port: {PORT}}}]"
        found.append(
            f"{{apiVersion: v1, kind: Service, metadata: {{name: s{number}, namespace: shop}},"
            f" spec: {{clusterIP: {vip(number)}, clusterIPs: [{vip(number)}], {kind}}}}}"
        )
        for port in sorted({port for _, port in backends}):
            addresses = ", ".join(ip for ip, own in backends if own == port)
            found.append(
                "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4,"
                f" metadata: {{name: s{number}-{port}, namespace: shop,"
                f" labels: {{kubernetes.io/service-name: s{number}}}}},"
                f" endpoints: [{{addresses: [{addresses}]}}], ports: [{{name: http, port: {port}}}]}}"
            )
    return "\n---\n".join(found) + "\n"
