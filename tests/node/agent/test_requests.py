"""HTTP rules: Envoy passes the requests that they allow, and no others."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cells.observe.events import RequestRecord
from cells.observe.monitor import SOCKET
from cells.proxy.envoy import EnvoyProgramSettings
from cells.proxy.envoy.ports import EnvoyProgram
from cells.proxy.envoy.resources import EnvoyFiles
from hive.client import ask, connect
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.children import Stop
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab
from tests.node.agent.cluster_services import VIP, manifests
from tests.node.agent.manifests import pod, write
from tests.support.agents import known_pods, serving
from tests.support.envoy import external_bootstrap
from tests.support.requests import (
    GRPC_SERVER,
    PORT,
    PUBLIC,
    Answer,
    Shop,
    answering,
    ask_http,
    monitored,
    of_entities,
    policy,
    shop,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

WITHOUT_KUBE_PROXY = "--kube-proxy-replacement=true"
HOST_ROUTING = {
    "legacy routing": (),
    "host routing": (WITHOUT_KUBE_PROXY,),
    "host routing, native": (
        *(WITHOUT_KUBE_PROXY, "--routing-mode=native", "--auto-direct-node-routes=true"),
        *("--ipv4-native-routing-cidr=10.0.0.0/8", "--ipv6-native-routing-cidr=f00d::/16"),
    ),
    "host routing, endpoint routes": (WITHOUT_KUBE_PROXY, "--enable-endpoint-routes=true"),
}


def test_a_pod_is_asked_what_its_policy_allows(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path) as place:
        answer = place.get("/public/1?x=1")
        assert answer.status == 200
        assert answer.body == place.client.ipv4, "the server sees who asks"
        refused = place.get("/secret")
        assert (refused.status, refused.body) == (403, "Access denied\r\n")
        assert place.get("/public/1", method="POST").status == 403


@pytest.mark.parametrize("settings", HOST_ROUTING.values(), ids=HOST_ROUTING)
def test_a_pod_asks_others_what_its_own_policy_allows(
    node: Lab, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    with shop(node, tmp_path, *settings) as place:
        place.rule(policy(PUBLIC, direction="egress"))
        eventually(lambda: place.enforced == {"egress"})  # the policy before answers 403, too
        assert place.get("/secret").status == 403
        assert place.get("/public/1") == (200, place.client.ipv4), "the server sees who asks"
        assert place.here.run(ask_http, place.server.ipv6, "/public/1") == (200, place.client.ipv6)
        place.rule(policy(PUBLIC), policy({"headers": ["X-Shop: 1"]}, direction="egress", name="out"))
        eventually(lambda: place.enforced == {"ingress", "egress"})
        eventually(lambda: place.get("/public/1").status == 403)
        both = place.get("/public/1", **{"X-Shop": "1"})
        assert both == (200, place.client.ipv4), "both policies allow it, and the server sees who asks"
        assert place.get("/secret", **{"X-Shop": "1"}).status == 403, "the server's is asked as well"


LIMITS = (
    *("--http-idle-timeout=60", "--http-max-grpc-timeout=60", "--http-retry-timeout=30"),
    *("--proxy-max-concurrent-retries=64", "--proxy-max-connection-duration-seconds=60"),
    *("--proxy-xff-num-trusted-hops-ingress=2", "--proxy-xff-num-trusted-hops-egress=1"),
)


COUNTING_SERVER = f"""
import http.server
class Count(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    count = 0
    def do_GET(self):
        self.count += 1
        body = str(self.count).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", {PORT}), Count).serve_forever()
"""
"""It answers how many requests came by the connection."""


@pytest.mark.parametrize("most", [0, 1])
def test_envoy_keeps_to_the_limits_of_its_settings(node: Lab, tmp_path: Path, most: int) -> None:
    limits = (*LIMITS, f"--proxy-max-requests-per-connection={most}")
    with shop(node, tmp_path, *limits, server=COUNTING_SERVER) as place:
        place.rule(policy(PUBLIC))
        eventually(lambda: place.get("/secret").status == 403)
        eventually(lambda: place.get("/public/1").status == 200)  # the server listens, too
        with inside(place.here):
            connection = http.client.HTTPConnection(place.server.ipv4, PORT, timeout=30)
            counts = []
            for _ in range(3):
                connection.request("GET", "/public/1")
                counts.append(int(connection.getresponse().read()))
            connection.close()
        assert counts == ([1, 1, 1] if most else [counts[0] + turn for turn in range(3)])


def test_redirects_go_on_without_the_agent_and_end_without_envoy(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path) as place, place.talking() as ask:
        assert ask("/public/1") == 200
        envoy, ports = place.envoy, place.ports
        agent_process.crash(node)
        assert ask("/public/2") == 200, "the connection goes on"
        assert place.get("/secret").status == 403
        place.pid = serving(node, f"--manifests-dir={tmp_path}", "--enable-ipv6=true")
        eventually(lambda: place.ports == ports)
        assert ask("/public/3") == 200
        assert place.envoy == envoy
        place.rule(policy({"path": "/other"}))
        eventually(lambda: ask("/public/4") == 403)
        assert ask("/other") == 200, "what the rules say now, of open connections, too"
        os.kill(envoy, signal.SIGKILL)
        eventually(lambda: place.get("/other").status == 200)
        assert place.envoy != envoy, "the agent has started another one"
        assert place.get("/public/1").status == 403


def test_no_request_passes_unread_while_envoy_dies_and_comes_back(node: Lab, tmp_path: Path) -> None:
    """Connections that it read end at once, and new ones fail until there is another one."""
    with shop(node, tmp_path) as place, place.talking() as ask:
        assert ask("/public/1") == 200
        asking = place.here.start(_keeps_asking, place.server.ipv4)
        for _ in range(2):
            envoy = place.envoy
            os.kill(envoy, signal.SIGKILL)
            eventually(lambda: place.envoy != envoy and place.get("/public/1").status == 200)  # noqa: B023
        with pytest.raises((OSError, http.client.HTTPException)):
            ask("/public/2")
        found = asking.finish(within=60)
        assert {("/public/1", 200), ("/secret", 403)} <= found
        assert found <= {("/public/1", 200), ("/secret", 403), ("/public/1", 0), ("/secret", 0)}


def _keeps_asking(stop: Stop, address: str) -> set[tuple[str, int]]:
    """Until it is stopped; paths and the status of their answers, 0 where there is none."""
    found = set()
    while not stop.wait(0):
        for path in ("/public/1", "/secret"):
            try:
                found.add((path, ask_http(address, path).status))
            except (OSError, http.client.HTTPException):
                found.add((path, 0))
    return found


def test_nothing_of_envoy_is_there_before_a_rule_asks_for_it(node: Lab, tmp_path: Path) -> None:
    known_pods(tmp_path, "server")
    serving(node, f"--manifests-dir={tmp_path}")
    pods.add(node, "server")
    with node.open() as there:
        assert not there.run(os.path.exists, "/var/run/cilium/envoy")


def test_calls_of_grpc_are_requests(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path, server=GRPC_SERVER) as place:
        assert place.call("/shop.Cart/Get", "/shop.Cart/Drop") == ["OK", "OK"]
        place.rule(policy({"method": "POST", "path": "/shop\\.Cart/Get"}))
        eventually(lambda: place.call("/shop.Cart/Drop") == ["PERMISSION_DENIED"])
        assert place.call("/shop.Cart/Get", "/shop.Cart/Drop") == ["OK", "PERMISSION_DENIED"]


def test_the_monitor_shows_http_requests(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path) as place, connect(api_socket(place.pid).with_name(SOCKET)) as stream:
        eventually(lambda: place.get("/public/1").status == 200 and select.select([stream], [], [], 0.2)[0])
        records = monitored(stream, RequestRecord)
        request = next(one for one in records if one.url.endswith("/public/1"))  # not one asked for before
        answer = next(records)
        assert (request.ingress, request.verdict, request.method) == (True, "Forwarded", "GET")
        assert request.url == f"http://{place.server.ipv4}:{PORT}/public/1"
        assert (request.source.address, request.destination.address) == (place.client.ipv4, place.server.ipv4)
        assert request.source.identity != request.destination.identity
        assert request.source.endpoint != request.destination.endpoint
        assert "k8s:app=client" in request.source.labels
        assert "k8s:app=server" in request.destination.labels
        assert (answer.answer, answer.code) == (True, 200)
        assert place.get("/secret").status == 403
        refused = next(one for one in records if one.verdict == "Denied")
        assert (refused.answer, refused.verdict, refused.code) == (False, "Denied", 403)


def test_a_revision_waits_until_envoy_has_taken_the_rules(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path) as place:
        os.kill(place.envoy, signal.SIGSTOP)
        before = place.revisions
        place.rule(policy({"path": "/other"}))
        eventually(lambda: place.revisions.written > before.written)
        assert place.revisions.revision == before.revision
        os.kill(place.envoy, signal.SIGCONT)
        eventually(lambda: place.revisions.revision > before.revision)
        assert place.get("/other").status == 200, "at once"
        assert place.get("/public/1").status == 403


def test_rules_that_envoy_refuses_hold_up_no_others(node: Lab, tmp_path: Path) -> None:
    refused = policy({"headers": [""]}, direction="egress", name="refused")
    with shop(node, tmp_path) as place:
        before = place.revisions
        place.rule(policy({"path": "/other"}), refused)
        eventually(lambda: place.revisions.revision > before.revision, within=8)
        with node.open() as host:
            assert host.run(ask_http, place.server.ipv4, "/other").status == 200

        def unenforced() -> dict[str, str]:
            rows = ask("/statedb/dump/policies", api_socket(place.pid))["policies"]
            return {row["obj"]["name"]: row["obj"]["unenforced"] for row in rows}

        eventually(lambda: "Envoy has not accepted the rules" in unenforced()["refused"], within=40)
        assert unenforced()["requests"] == ""
        before = place.revisions
        place.rule(policy({"path": "/another"}), refused)
        eventually(lambda: place.revisions.revision > before.revision)
        place.rule(
            policy({"path": "/another"}), policy({"headers": ["X"]}, direction="egress", name="refused")
        )
        eventually(lambda: set(unenforced().values()) == {""}, within=40)
        assert place.get("/another", X="1").status == 200


def _refuses(host: Namespaces, address: str) -> bool:
    return host.run(ask_http, address, "/secret").status == 403


def test_http_rules_apply_to_ipv6_and_to_the_node(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path, "--allow-localhost=policy") as place, node.open() as host:
        answer = place.here.run(ask_http, place.server.ipv6, "/public/1")
        assert answer == (200, place.client.ipv6)
        assert place.here.run(ask_http, place.server.ipv6, "/secret").status == 403
        place.rule(of_entities(policy(PUBLIC), "host"))
        for address in (place.server.ipv4, place.server.ipv6):
            eventually(partial(_refuses, host, address))
            assert host.run(ask_http, address, "/public/1").status == 200


def _at_service(place: Shop, path: str) -> Answer:
    return place.here.run(partial(ask_http, VIP, path, port=80))


@pytest.mark.parametrize("settings", HOST_ROUTING.values(), ids=HOST_ROUTING)
def test_requests_to_a_service_are_read_by_both_policies(
    node: Lab, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    with shop(node, tmp_path, *settings) as place:
        (tmp_path / "service.yaml").write_text(manifests(place.server.ipv4), encoding="utf-8")
        eventually(lambda: _at_service(place, "/secret").status == 403)
        assert _at_service(place, "/public/1") == (200, place.client.ipv4)
        place.rule(policy(PUBLIC, direction="egress"))
        eventually(lambda: place.get("/secret").status == 403)
        eventually(lambda: _at_service(place, "/public/1").status == 200)
        assert _at_service(place, "/secret").status == 403


@contextmanager
def envoy_beside(node: Lab, folder: Path) -> Iterator[None]:
    """With an Envoy that the agent has not started, as the pod cilium-envoy runs it."""
    bootstrap = folder / "bootstrap.json"
    place = EnvoyFiles(Path("/var/run/cilium/envoy"))
    bootstrap.write_text(json.dumps(external_bootstrap(place, "127.0.0.1", 9878, 9964)), encoding="utf-8")
    program = EnvoyProgram(EnvoyProgramSettings()).path
    assert program is not None
    command = [program, "-c", bootstrap, "--log-path", folder / "envoy.log", "--disable-hot-restart"]
    with node.open() as there:
        running = there.popen(list(map(str, command)))
    try:
        yield
    finally:
        running.kill()
        running.wait()


def _unenforced(pid: int) -> str:
    (row,) = ask("/statedb/dump/policies", api_socket(pid))["policies"]
    assert row["obj"]["valid"]
    return str(row["obj"]["unenforced"])


def _hive(pid: int, *words: str) -> str:
    command = [sys.executable, "-m", "hive", *words, "--socket", str(api_socket(pid))]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def _connects(address: str) -> bool:
    try:
        socket.create_connection((address, PORT), 1).close()
    except TimeoutError:
        return False
    return True


def test_without_envoy_http_rules_deny_and_are_reported(node: Lab, tmp_path: Path) -> None:
    write(tmp_path, "pods", pod("client", {"app": "client"}), pod("server", {"app": "server"}))
    pid = serving(node, f"--manifests-dir={tmp_path}", "--external-envoy-proxy=true")
    seller, client = pods.add(node, "server"), pods.add(node, "client")
    with node.open_pod("server") as there, node.open_pod("client") as here, answering(there):
        place = Shop(node, pid, client, seller, here, tmp_path)
        eventually(lambda: place.get("/secret").status == 200)
        place.rule(policy(PUBLIC))
        eventually(lambda: not here.run(_connects, seller.ipv4))
        eventually(lambda: "Envoy does not run" in _unenforced(pid), within=40)
        assert "CiliumNetworkPolicy default/requests: Envoy does not run" in _hive(pid, "status")
        assert "Envoy does not run" in _hive(pid, "policy", "list")
        with envoy_beside(node, tmp_path):
            eventually(lambda: _unenforced(pid) == "", within=40)
            assert place.get("/secret").status == 403
            assert place.get("/public/1").status == 200
        assert not here.run(_connects, seller.ipv4)
        eventually(lambda: "Envoy does not run" in _unenforced(pid), within=40)
