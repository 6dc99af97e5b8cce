"""Host policy by nodeSelector: enforced over a restart, and updated with the node's labels."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.flows import tcp_listener
from tests.node.agent.manifests import this_node, write
from tests.support.agents import known_pods, serving
from tests.support.fqdn_scenario import connects
from tests.support.hostile_node import link_socket, mac_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.node


def allowing(port: int) -> dict[str, Any]:
    ports = [{"ports": [{"port": str(port), "protocol": "TCP"}]}]
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumClusterwideNetworkPolicy",
        "metadata": {"name": "guarded"},
        "spec": {
            "nodeSelector": {"matchLabels": {"guarded": "yes"}},
            "ingress": [{"fromEntities": ["all"], "toPorts": ports}],
        },
    }


def audit(pid: int, endpoint: int, mode: str) -> None:
    """As ``hive endpoint config`` does."""
    path, options = f"/v1/endpoint/{endpoint}/config", {"options": {"PolicyAuditMode": mode}}
    ask(path, api_socket(pid), method="PATCH", body=options)
    assert ask(path, api_socket(pid))["realized"]["options"]["PolicyAuditMode"] == mode


def host_endpoint(pid: int) -> dict[str, Any]:
    (found,) = (one for one in ask("/v1/endpoint", api_socket(pid)) if one["status"]["identity"]["id"] == 1)
    assert isinstance(found, dict)
    return found


def test_a_node_is_reached_as_the_policies_that_select_it_say(node: Lab, tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    write(manifests, "node", this_node("yes"))
    settings = ("--enable-host-firewall=true", f"--manifests-dir={manifests}")
    known_pods(manifests, "pod")
    pid = serving(node, *settings)
    pod = pods.add(node, "pod")
    with node.open() as here, node.open_outside() as outside, node.open_pod(pod.pod) as inside_pod:
        with inside(here):
            listeners = [tcp_listener(), tcp_listener()]
        open_port, closed_port = (each.getsockname()[1] for each in listeners)
        try:

            def reached(port: int) -> tuple[bool, bool]:
                """From outside, and from a pod."""
                return tuple(  # type: ignore[return-value]  # of two
                    each.run(partial(connects, NODE_ADDRESS, port)) for each in (outside, inside_pod)
                )

            assert reached(closed_port) == (True, True)
            write(manifests, "policy", allowing(open_port))
            eventually(lambda: reached(closed_port) == (False, False))
            assert reached(open_port) == (True, True)
            shown = host_endpoint(pid)
            assert shown["status"]["state"] == "ready"
            assert set(shown["status"]["identity"]["labels"]) == {"k8s:guarded=yes", "reserved:host"}
            assert shown["status"]["policy"]["realized"]["policy-enabled"] == "ingress"
            assert ask("/v1/healthz", api_socket(pid))["host-firewall"]["mode"] == "Enabled"

            audit(pid, shown["id"], "Enabled")
            assert reached(closed_port) == (True, True), "only told"
            audit(pid, shown["id"], "Disabled")
            assert reached(closed_port) == (False, False)
            with pytest.raises(click.ClickException, match="endpoint may not be associated reserved labels"):
                ask(f"/v1/endpoint/{shown['id']}", api_socket(pid), method="DELETE")

            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert reached(closed_port) == (False, False), "while no agent runs"
            pid = serving(node, *settings)
            assert reached(closed_port) == (False, False)
            eventually(lambda: "k8s:guarded=yes" in host_endpoint(pid)["status"]["identity"]["labels"])
            assert host_endpoint(pid)["id"] == shown["id"]

            write(manifests, "node", this_node("no"))
            eventually(lambda: reached(closed_port) == (True, True))
        finally:
            for each in listeners:
                each.close()


def drops(pid: int) -> float:
    """Packets that policy has stopped on their way in."""
    return sum(
        float(one["value"])
        for one in ask("/v1/metrics/", api_socket(pid))
        if one["name"] == "cilium_drop_count_total"
        and one["labels"] == {"direction": "INGRESS", "reason": "Policy denied"}
    )


TAGGED = (
    Dot1Q(vlan=5),
    Dot1Q(vlan=0) / Dot1Q(vlan=5),
    Dot1AD(vlan=0) / Dot1Q(vlan=5),
    Dot1AD(vlan=5) / Dot1Q(vlan=0),
)
UNTAGGED = (Dot1Q(vlan=0), Dot1AD(vlan=0) / Dot1Q(vlan=0), Dot1Q(vlan=0) / Dot1Q(vlan=0))


def test_packets_of_a_vlan_are_not_taken_for_the_devices_own(node: Lab, tmp_path: Path) -> None:
    """The kernel takes the first tag off before the program, which reads it beside the packet."""
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    write(manifests, "node", this_node("yes"))
    write(manifests, "policy", allowing(1))
    pid = serving(node, "--enable-host-firewall=true", f"--manifests-dir={manifests}")
    with node.open() as here, node.open_outside() as outside:
        eventually(lambda: not outside.run(partial(connects, NODE_ADDRESS, 22)))
        frame = Ether(src=mac_of(outside, "node"), dst=mac_of(here, "uplink"))
        knock = IP(src=OUTSIDE_ADDRESS, dst=NODE_ADDRESS) / TCP(sport=4000, dport=22, flags="S")
        with link_socket(outside, "node") as sending:
            before = drops(pid)
            for tags in (*TAGGED, *UNTAGGED):
                sending.send(bytes(frame / tags / knock))
            eventually(lambda: drops(pid) >= before + len(UNTAGGED))
            assert drops(pid) == before + len(UNTAGGED)
