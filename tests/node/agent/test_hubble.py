"""Hubble of a real agent: pods' flows with names and reasons, by its socket and by mutual TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from cells.hubble.codec import decode, encode
from cells.hubble.enums import DropReason, FlowVerdict
from cells.hubble.flow import Flow, FlowFilter
from cells.hubble.rpc.observer import GetFlowsRequest, GetFlowsResponse
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.probe import ping
from tests.support.agents import environment, serving
from tests.support.apiserver.certificates import Authority
from tests.support.fqdn_scenario import WEB, fqdn_scenario
from tests.support.ports import free_port
from tests.support.requests import PORT, shop
from tests.support.waiting import eventually
from tests.unit.kubernetes.cluster import pod

pytestmark = pytest.mark.node
T = TypeVar("T")


def observed(lab: Lab, *words: str) -> list[dict[str, Any]]:
    """The flows that ``hive observe`` prints inside the node."""
    command = [sys.executable, "-m", "hive", "observe", "-o", "json", "--all", *words]
    with (
        lab.open() as node,
        node.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        ) as process,
    ):
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    return [json.loads(line)["flow"] for line in out.splitlines()]


CLOSED = """apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: closed, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: server}}
  ingressDeny: [{fromEndpoints: [{}]}]
"""


def tried(lab: Lab, policy: Path) -> dict[str, Any]:
    """What ``hive policy try`` finds inside the node."""
    command = [sys.executable, "-m", "hive", "policy", "try", str(policy), "-o", "json"]
    with (
        lab.open() as node,
        node.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        ) as process,
    ):
        out, err = process.communicate(timeout=60)
    assert (process.returncode in (0, 1, 3), err) == (True, b"")
    found: dict[str, Any] = json.loads(out)
    return found


def fetched(socket: Path, wanted: FlowFilter) -> list[Flow]:
    """The flows that grpcio gets by the agent's socket."""
    request = encode(GetFlowsRequest(number=1000, whitelist=(wanted,)))
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        answers = channel.unary_stream("/observer.Observer/GetFlows")(request, timeout=30)
        return [flow for one in answers if (flow := decode(GetFlowsResponse, one).flow) is not None]


def appears(look: Callable[[], list[T]]) -> T:
    """The first of what is found, as soon as there is any."""
    eventually(lambda: bool(look()))
    return look()[0]


def test_requests_of_pods_are_seen_by_both_sockets(node: Lab, tmp_path: Path) -> None:
    authority, port, manifests = Authority(tmp_path), free_port(), tmp_path / "manifests"
    manifests.mkdir()
    certificate, key = authority.issue("server", "/CN=server")
    client_certificate, client_key = authority.issue("client", "/CN=relay")
    settings = (
        *("--enable-hubble=true", f"--hubble-listen-address=127.0.0.1:{port}"),
        *(f"--hubble-tls-cert-file={certificate}", f"--hubble-tls-key-file={key}"),
        f"--hubble-tls-client-ca-files={authority.certificate}",
    )
    with shop(node, manifests, *settings) as place:
        assert place.get("/public/1").status == 200
        assert place.here.run(ping, place.server.ipv4, 1) == [], "the policy speaks of TCP alone"
        refused = appears(lambda: observed(node, "--verdict", "DROPPED", "--http-path", "/secret"))
        assert refused["source"]["pod_name"] == "client"
        assert refused["destination"]["pod_name"] == "server"
        assert refused["l7"]["type"] == "REQUEST"
        mutual = (
            *("--server", f"tls://127.0.0.1:{port}", "--tls-server-name", "api.test"),
            *("--tls-ca-cert-files", str(authority.certificate)),
            *("--tls-client-cert-file", str(client_certificate), "--tls-client-key-file", str(client_key)),
        )
        public = ("--http-path", "/public/1", "--http-status", "200")
        answered = appears(lambda: observed(node, *public, *mutual))
        assert answered["l7"]["type"] == "RESPONSE"
        assert answered["verdict"] == "FORWARDED"
        dropped = appears(lambda: observed(node, "--type", "drop", "-4", "--protocol", "icmp", *mutual))
        assert dropped["drop_reason_desc"] == "POLICY_DENIED"
        assert dropped["source"]["namespace"] == dropped["destination"]["namespace"] == "default"
        assert (dropped["source"]["pod_name"], dropped["IP"]["source"]) == ("client", place.client.ipv4)
        assert "k8s:app=server" in dropped["destination"]["labels"]
        assert dropped["traffic_direction"] == "INGRESS"
        to_envoy = ("--type", "policy-verdict", "--to-port", str(PORT), "--verdict", "REDIRECTED")
        decided = appears(lambda: observed(node, *to_envoy))
        assert [one["name"] for one in decided["ingress_allowed_by"]] == ["requests"]
        assert decided["traffic_direction"] == "INGRESS"
        closed = tmp_path / "closed.yaml"
        closed.write_text(CLOSED)
        found = tried(node, closed)
        (cut,) = [one for one in found["cut"] if one["port"] == f"{PORT}/TCP"]
        assert (cut["direction"], cut["of"], cut["peers"]) == (
            "ingress",
            ["default/server"],
            ["default/client"],
        )
        assert cut["rules"] == [f"{closed}:6: spec.ingressDeny[0] of CiliumNetworkPolicy default/closed"]
        closed.write_text(CLOSED.replace("app: server", "app: other"))
        assert not tried(node, closed)["cut"], "it selects no pod of these"


def test_a_network_that_selects_a_pod_is_named_by_the_flows_it_allows(node: Lab, tmp_path: Path) -> None:
    settings = ("--enable-hubble=true", "--policy-cidr-match-mode=pods")
    for name in ("client", "server", "other"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(pod(name, "node", app=name)))
    serving(node, f"--manifests-dir={tmp_path}", *settings)
    server, other, _ = (pods.add(node, name) for name in ("server", "other", "client"))
    spec = {
        "podSelector": {"matchLabels": {"app": "client"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"ipBlock": {"cidr": f"{server.ipv4}/32"}}]}],
    }
    metadata = {"name": "blocks", "namespace": "default"}
    network_policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    written = tmp_path / ".policy.new"
    written.write_text(json.dumps({**network_policy, "metadata": metadata, "spec": spec}))
    written.rename(tmp_path / "policy.yaml")
    with node.open_pod("client") as inside:
        eventually(lambda: not inside.run(ping, other.ipv4, 1, 0.3))
        eventually(lambda: inside.run(ping, server.ipv4, 1, 0.3))
    to_server = ("--type", "policy-verdict", "--from-pod", "client", "--to-pod", "server")
    allowed = appears(
        lambda: [one for one in observed(node, *to_server) if one.get("egress_allowed_by")],
    )
    (by,) = allowed["egress_allowed_by"]
    assert (by["kind"], by["namespace"], by["name"]) == ("NetworkPolicy", "default", "blocks")
    dropped = appears(lambda: observed(node, "--verdict", "DROPPED", "--to-pod", "other"))
    assert (dropped["source"]["pod_name"], dropped["drop_reason_desc"]) == ("client", "POLICY_DENIED")


def test_lookups_and_what_names_allow_are_seen_by_grpcio(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path, "--enable-hubble=true") as place:
        path = api_socket(place.pid).with_name("hubble.sock")
        assert not place.reaches_web(), "the name is not known yet"
        assert place.look().addresses == (OUTSIDE_ADDRESS,)
        assert place.reaches_web()
        look = partial(fetched, path)
        dropped = appears(lambda: look(FlowFilter(verdict=(FlowVerdict.DROPPED,), protocol=("tcp",))))
        assert dropped.drop_reason_desc == DropReason.POLICY_DENIED
        assert dropped.source is not None
        assert dropped.source.pod_name == "client"
        assert dropped.destination is not None
        assert list(dropped.destination.labels) == ["reserved:world-ipv4"]
        answer = appears(lambda: look(FlowFilter(dns_query=(WEB,), reply=(True,))))
        assert answer.l7 is not None
        assert answer.l7.dns is not None
        assert list(answer.l7.dns.ips) == [OUTSIDE_ADDRESS]
        named = FlowFilter(
            source_pod=("default/client",), destination_fqdn=(WEB,), verdict=(FlowVerdict.FORWARDED,)
        )
        assert appears(lambda: look(named)).destination_names == (WEB,)
