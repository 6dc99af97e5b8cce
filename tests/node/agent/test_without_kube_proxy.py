"""The steps of docs/operate/without-kube-proxy.md, on a node that kube-proxy served before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.children import Child
from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.flows import tcp_listener
from hive.lab.traffic.requests import answer
from hive.lab.traffic.requests import send_requests as request
from tests.node.agent.named_servers import ASKED, joined
from tests.node.agent.netfilter import IPTABLES, looked, run
from tests.support.agents import known_pods, serving
from tests.support.cgroups import unified
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

VIP, PORT, NODE_PORT, TARGET = "10.96.0.30", 80, 31940, 8080
RULE = "-A KUBE-SERVICES -d 10.96.0.30/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-NGINX"
OF_KUBE_PROXY = IPTABLES.replace(":KUBE-SERVICES", ":KUBE-SVC-NGINX - [0:0]\n:KUBE-SERVICES").replace(
    "COMMIT", f"{RULE}\nCOMMIT"
)
CLEANED = "*nat\n-F PREROUTING\n-F KUBE-SERVICES\n-X KUBE-SERVICES\n-X KUBE-SVC-NGINX\nCOMMIT\n"


def manifests(*backends: str) -> str:
    endpoints = ", ".join(f"{{addresses: [{ip}]}}" for ip in backends)
    return f"""
apiVersion: v1
kind: Service
metadata: {{name: my-nginx, namespace: default}}
spec: {{type: NodePort, clusterIP: {VIP}, clusterIPs: [{VIP}],
  ports: [{{name: http, port: {PORT}, nodePort: {NODE_PORT}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: my-nginx-1, namespace: default, labels: {{kubernetes.io/service-name: my-nginx}}}}
addressType: IPv4
endpoints: [{endpoints}]
ports: [{{name: http, port: {TARGET}}}]
"""


def chains() -> int:
    """``iptables-save | grep -c KUBE-SVC``, of both kinds."""
    return sum(run("", f"iptables-{kind}-save").count("KUBE-SVC") for kind in ("legacy", "nft"))


def test_the_documented_replacement_of_kube_proxy_works(node: Lab, tmp_path: Path) -> None:
    with node.open() as place:
        for kind in ("legacy", "nft"):
            place.run(run, OF_KUBE_PROXY, f"iptables-{kind}-restore", "--noflush")
        assert place.run(chains) > 0
        for kind in ("legacy", "nft"):  # kube-proxy --cleanup
            place.run(run, CLEANED, f"iptables-{kind}-restore", "--noflush")

    known_pods(tmp_path, "client", "one", "two")
    pid = serving(node, f"--manifests-dir={tmp_path}", "--kube-proxy-replacement=true")
    one, two = (pods.add(node, name) for name in ("one", "two"))
    pods.add(node, "client")
    (tmp_path / "nginx.yaml").write_text(manifests(one.ipv4, two.ipv4))

    look(node, pid, {f"{one.ipv4}:{TARGET}", f"{two.ipv4}:{TARGET}"})
    group = unified() / f"hive-lab-{node.name}"
    started: list[Child[int]] = []
    try:
        for pod in (one, two):
            with node.open_pod(pod.pod) as place:
                with inside(place):
                    listener = tcp_listener(port=TARGET)
                with listener:
                    started.append(place.start(answer, listener, pod.pod))
        with (
            node.open() as host,
            node.open_outside() as outside,
            node.open_pod("client") as client,
            node.open_pod("one") as itself,
        ):
            asked = {
                "the node, by its loopback": host.run(joined, group, "127.0.0.1", NODE_PORT),
                "the node, by its address": host.run(joined, group, NODE_ADDRESS, NODE_PORT),
                "the node, by the cluster address": host.run(joined, group, VIP, PORT),
                "a pod, by the cluster address": client.run(joined, group, VIP, PORT),
                "a pod that serves, and so asks itself": itself.run(joined, group, VIP, PORT),
                "a client outside": outside.run(request, (NODE_ADDRESS, NODE_PORT), ASKED),
            }
            assert host.run(chains) == 0
    finally:
        for each in started:
            each.kill()
    for who, found in asked.items():
        assert (who, found.failed, found.servers) == (who, [], ["one", "two"])
    assert "rules of kube-proxy" not in agent_process.log_end(node, 1000)


def look(node: Lab, pid: int, backends: set[str]) -> None:
    """What step 5 looks at."""
    eventually(lambda: looked(pid))
    replacement = ask("/v1/healthz", api_socket(pid))["kube-proxy-replacement"]
    assert replacement["mode"] == "True"
    features = replacement["features"]
    for feature in ("nodePort", "externalIPs", "hostPort", "sessionAffinity", "socketLB"):
        assert features[feature]["enabled"], feature
    assert "service.cilium.io/type" in features["annotations"]

    def listed() -> dict[str, set[str]]:
        """Backends of node ports, as ``service list`` shows them."""
        return {
            "{ip}:{port}/{protocol}".format(**one["spec"]["frontend-address"]): {
                f"{each['ip']}:{each['port']}" for each in one["spec"].get("backend-addresses", ())
            }
            for one in ask("/v1/service", api_socket(pid))
            if one["spec"]["flags"]["type"] == "NodePort"
        }

    wanted = {f"{ip}:{NODE_PORT}/TCP": backends for ip in ("0.0.0.0", NODE_ADDRESS)}
    eventually(lambda: listed() == wanted)
    rows = json.dumps(ask("/statedb/dump/node-port-addresses", api_socket(pid)))
    assert NODE_ADDRESS in rows
