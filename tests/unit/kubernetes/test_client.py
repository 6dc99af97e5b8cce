"""The client supports every connection form of a kubeconfig, and retries only safe requests."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells import kubernetes
from cells.kubernetes.api_server import access_of
from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access, Exec, in_cluster
from cells.kubernetes.client.calls import Bucket
from cells.kubernetes.client.client import Client, events
from cells.kubernetes.client.errors import (
    ApiError,
    ConflictError,
    CredentialsError,
    NotFoundError,
    UnreachableError,
)
from cells.kubernetes.objects.core import NODES
from cells.kubernetes.settings import AccessError, KubernetesSettings
from lifecycle import Hive, SettingsError
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Fault, User, on
from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.errors import Resource
from tests.unit.kubernetes import configured
from tests.unit.kubernetes.listening import listening

pytestmark = pytest.mark.anyio
NODE = Resource("", "nodes")
ADMIN = User("admin", ("system:masters",))


def node(name: str, **labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    async with one.serving():
        yield one


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    made = connect(access(server), qps=0, timeout=5)
    yield made
    await made.reset()


def access(server: ApiServer, **more: Any) -> Access:
    return Access(**{"servers": (f"http://127.0.0.1:{server.port}",), "token": ADMIN_TOKEN, **more})


# ---- reading and writing


async def test_objects_are_made_read_changed_and_deleted(client: Client) -> None:
    await client.create(NODES, node("a", x="1"))
    assert (await client.get(NODES, "a")).labels == {"x": "1"}
    with pytest.raises(ConflictError) as taken:
        await client.create(NODES, node("a"))
    assert taken.value.exists
    patched = await client.patch(NODES, "a", {"metadata": {"labels": {"y": "2"}}})
    assert patched.labels == {"x": "1", "y": "2"}
    added = [{"op": "add", "path": "/metadata/labels/z", "value": "3"}]
    assert (await client.patch(NODES, "a", added, how="json")).labels["z"] == "3"
    assert await client.delete(NODES, "a")
    assert not await client.delete(NODES, "a")
    with pytest.raises(NotFoundError):
        await client.get(NODES, "a")


async def test_a_write_that_was_overtaken_is_made_again_from_what_is_there(
    server: ApiServer, client: Client
) -> None:
    await client.create(NODES, node("a"))
    turns = 0

    def change(live: dict[str, Any]) -> dict[str, Any]:
        nonlocal turns
        turns += 1
        if turns < 3:  # another client is faster
            stored = server.store.get(server.kinds.storing(NODE).storage, ("", "a"))
            assert stored is not None
            server.store.put(NODE, ("", "a"), stored)
        live["metadata"]["labels"] = {"turn": str(turns)}
        return live

    found = await client.update(NODES, "a", change)
    assert found is not None
    assert found.labels["turn"] == "3"
    assert await client.update(NODES, "a", lambda _: None) is None


async def test_preconditions_keep_another_object_of_the_name(client: Client) -> None:
    made = await client.create(NODES, node("a"))
    with pytest.raises(ConflictError):
        await client.delete(NODES, "a", uid="00000000-0000-0000-0000-000000000000")
    assert await client.delete(NODES, "a", uid=made.metadata.uid)


# ---- trouble


async def test_reads_are_repeated_writes_only_when_nothing_has_happened(
    server: ApiServer, client: Client
) -> None:
    server.add(node("a"))
    server.faults.add(Fault(on("/api/v1/nodes/a"), times=2, status=503))
    server.faults.add(Fault(on("/api/v1/nodes/a"), times=1, close=True))
    assert (await client.get(NODES, "a")).name == "a"
    server.faults.add(
        Fault(on("/api/v1/nodes", method="POST"), times=1, status=429, headers={"Retry-After": "0"})
    )
    await client.create(NODES, node("b"))
    server.faults.add(Fault(on("/api/v1/nodes", method="POST"), times=1, status=504))
    with pytest.raises(ApiError, match="504"):
        await client.create(NODES, node("c"))
    server.faults.add(Fault(on("/api/v1/nodes", method="POST"), times=1, close=True))
    with pytest.raises(UnreachableError):
        await client.create(NODES, node("d"))


async def test_a_server_that_never_answers_is_left_after_the_deadline(server: ApiServer) -> None:
    server.faults.add(Fault(times=-1, stall=True))
    impatient = connect(access(server), qps=0, timeout=0.05)
    with pytest.raises(UnreachableError, match=r"silent for 0\.05 s"):
        await impatient.create(NODES, node("a"))
    await impatient.reset()


async def test_requests_that_a_server_refuses_at_the_same_time_all_go_to_the_next_one(
    server: ApiServer,
) -> None:
    server.add(node("a"))
    heads, all_asked = 0, asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heads
        while await reader.readuntil(b"\r\n\r\n"):
            heads += 1
            if heads == 10:
                all_asked.set()
            await all_asked.wait()
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")

    async with listening(refuse) as port:
        servers = (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{server.port}")
        client = connect(access(server, servers=servers), qps=0)
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(client.get, NODES, "a")
        assert heads == 10
        assert client.server == servers[1]
        await client.reset()


async def test_limits_of_zero_are_the_defaults(server: ApiServer) -> None:
    server.add(node("a"))
    client = connect(access(server), qps=0, timeout=0, keep_alive=0)
    assert (await client.get(NODES, "a")).name == "a"
    await client.reset()


@pytest.mark.parametrize(
    "option",
    ["k8s-client-connection-timeout", "k8s-client-connection-keep-alive", "k8s-heartbeat-timeout"],
)
def test_negative_limits_are_refused(option: str) -> None:
    with pytest.raises(SettingsError, match=f"{option}='-1s': expected at least 0s"):
        Hive(kubernetes.cell, configured.node(), settings={option: "-1s"}).check()


async def test_the_next_server_is_asked_and_stays_in_use(server: ApiServer) -> None:
    two = ApiServer()
    server.add(node("a"))
    async with two.serving() as dead:
        pass  # the listener is closed
    client = connect(access(server, servers=(dead, f"http://127.0.0.1:{server.port}")), qps=0)
    assert (await client.get(NODES, "a")).name == "a"
    assert client.server.endswith(str(server.port))
    await client.reset()


async def test_requests_wait_for_their_turn() -> None:
    now = 0.0
    bucket = Bucket(qps=10, burst=3, clock=lambda: now)
    assert [await bucket.take() for _ in range(3)] == [0, 0, 0]
    started = time.monotonic()
    assert await bucket.take() == pytest.approx(0.1)
    assert time.monotonic() - started >= 0.09
    now = 100.0
    assert await bucket.take() == 0


# ---- credentials


async def test_a_token_file_is_read_again_when_the_token_is_refused(tmp_path: Path) -> None:
    server = ApiServer({"first": ADMIN})
    token = tmp_path / "token"
    token.write_text("first\n")
    async with server.serving():
        client = connect(access(server, token="", token_file=token), qps=0)
        await client.create(NODES, node("a"))
        server.users.tokens = {"second": ADMIN}
        token.write_text("second\n")
        assert (await client.get(NODES, "a")).name == "a"
        server.users.tokens = {}
        with pytest.raises(ApiError, match="401"):
            await client.get(NODES, "a")
        await client.reset()


def plugin(folder: Path, text: str) -> str:
    path = folder / "plugin"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


async def test_a_plugin_gives_the_token_once_and_again_when_it_has_expired(tmp_path: Path) -> None:
    server = ApiServer({"given": ADMIN})
    answer = {"kind": "ExecCredential", "status": {"token": "given"}}
    text = f"echo run >> {tmp_path}/runs; test -n \"$KUBERNETES_EXEC_INFO\" && echo '{json.dumps(answer)}'"
    async with server.serving():
        client = connect(access(server, token="", exec=Exec(plugin(tmp_path, text))), qps=0)
        for _ in range(3):
            await client.page(NODES, {})
        assert (tmp_path / "runs").read_text().count("run") == 1
        await client.reset()
        answer["status"]["expirationTimestamp"] = "2020-01-01T00:00:00Z"  # type: ignore[index]  # it is a dict
        text = f"echo run >> {tmp_path}/runs; echo '{json.dumps(answer)}'"
        client = connect(access(server, token="", exec=Exec(plugin(tmp_path, text))), qps=0)
        for _ in range(2):
            await client.page(NODES, {})
        assert (tmp_path / "runs").read_text().count("run") >= 3
        await client.reset()


async def test_requests_refused_at_the_same_time_run_the_plugin_once(tmp_path: Path) -> None:
    server = ApiServer({"first": ADMIN})
    (tmp_path / "token").write_text("first")
    text = f"""echo run >> {tmp_path}/runs
printf '{{"status": {{"token": "%s"}}}}' "$(cat {tmp_path}/token)\""""
    async with server.serving():
        client = connect(access(server, token="", exec=Exec(plugin(tmp_path, text))), qps=0)
        await client.create(NODES, node("a"))
        server.users.tokens = {"second": ADMIN}
        (tmp_path / "token").write_text("second")
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client.get, NODES, "a")
        assert (tmp_path / "runs").read_text().count("run") == 2
        await client.reset()


async def test_a_watch_with_a_refused_token_has_a_new_one_the_next_time(tmp_path: Path) -> None:
    server = ApiServer({"first": ADMIN})
    (tmp_path / "token").write_text("first")
    text = f"""printf '{{"status": {{"token": "%s"}}}}' "$(cat {tmp_path}/token)\""""
    async with server.serving():
        client = connect(access(server, token="", exec=Exec(plugin(tmp_path, text))), qps=0)
        await client.create(NODES, node("a"))
        server.users.tokens = {"second": ADMIN}
        (tmp_path / "token").write_text("second")
        with pytest.raises(ApiError, match="401"):
            async with client.watch(NODES, {"resourceVersion": "0"}, silence=5):
                pass
        async with client.watch(NODES, {"resourceVersion": "0"}, silence=5) as blocks:
            assert [event.type for event in events(await anext(blocks))] == ["ADDED"]
        await client.reset()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo nonsense", "expected an ExecCredential"),
        ("echo no such user >&2; exit 3", "exit 3: no such user"),
    ],
)
async def test_a_failing_exec_plugin_is_reported(
    server: ApiServer, tmp_path: Path, text: str, message: str
) -> None:
    client = connect(access(server, token="", exec=Exec(plugin(tmp_path, text))), qps=0)
    with pytest.raises(CredentialsError, match=message):
        await client.page(NODES, {})


async def test_impersonation_is_asked_for(server: ApiServer) -> None:
    client = connect(access(server, impersonate_user="jane", impersonate_groups=("dev",)), qps=0)
    with pytest.raises(ApiError, match='User "jane" cannot list'):
        await client.page(NODES, {})
    await client.reset()


async def test_an_authority_without_key_usage_is_trusted(tmp_path: Path) -> None:
    """Clusters have such; Python 3.13 would refuse them."""
    authority = Authority(tmp_path, usage=False)
    server = ApiServer()
    async with server.serving(tls=authority.serving()) as url:
        client = connect(Access(servers=(url,), ca_file=authority.certificate), qps=0)
        with pytest.raises(ApiError, match='User "system:anonymous"'):  # it was asked
            await client.create(NODES, node("a"))
        await client.reset()


async def test_the_hosts_authorities_are_not_trusted_where_a_kubeconfig_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("of-the-host", "of-the-cluster"):
        (tmp_path / name).mkdir()
    hosts, clusters = Authority(tmp_path / "of-the-host"), Authority(tmp_path / "of-the-cluster")
    monkeypatch.setenv("SSL_CERT_FILE", str(hosts.certificate))
    server = ApiServer()
    async with server.serving(tls=hosts.serving()) as url:
        client = connect(Access(servers=(url,), ca_data=clusters.certificate.read_bytes()), qps=0)
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            await client.create(NODES, node("a"))
        await client.reset()
        client = connect(Access(servers=(url,)), qps=0)
        with pytest.raises(ApiError, match='User "system:anonymous"'):  # it was asked
            await client.create(NODES, node("a"))
        await client.reset()


async def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("admin", "/O=system:masters/CN=admin")
    server = ApiServer()
    async with server.serving(tls=authority.serving()) as url:
        known = Access(servers=(url,), ca_file=authority.certificate)
        files = connect(Access(**{**fields(known), "certificate_file": certificate, "key_file": key}), qps=0)
        await files.create(NODES, node("a"))
        data = {"certificate_data": certificate.read_bytes(), "key_data": key.read_bytes()}
        bytes_ = connect(Access(**{**fields(known), **data}), qps=0)
        assert (await bytes_.get(NODES, "a")).name == "a"
        named = connect(Access(**{**fields(known), **data, "tls_server_name": "api.test"}), qps=0)
        assert (await named.get(NODES, "a")).name == "a"
        wrong = connect(Access(**{**fields(known), **data, "tls_server_name": "other.test"}), qps=0)
        with pytest.raises(UnreachableError, match="Hostname mismatch"):
            await wrong.create(NODES, node("b"))
        strangers = connect(Access(servers=(url,)), qps=0)
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            await strangers.create(NODES, node("b"))
        trusting = connect(Access(**{**fields(known), **data, "ca_file": None, "insecure": True}), qps=0)
        assert (await trusting.get(NODES, "a")).name == "a"
        for one in (files, bytes_, named, wrong, strangers, trusting):
            await one.reset()


def fields(one: Access) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


async def test_a_proxy_is_asked_to_connect(server: ApiServer) -> None:
    server.add(node("a"))
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")[0])
        body = json.dumps(node("a")).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    client = connect(access(server, proxy_url=f"http://127.0.0.1:{port}"), qps=0)
    assert (await client.get(NODES, "a")).name == "a"
    assert asked == [f"GET http://127.0.0.1:{server.port}/api/v1/nodes/a HTTP/1.1"]
    await client.reset()
    proxy.close()
    await proxy.wait_closed()


# ---- where the server is


def test_a_pod_finds_the_server_of_its_cluster(tmp_path: Path) -> None:
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert in_cluster({}, tmp_path) is None
    with pytest.raises(AccessError, match="KUBERNETES_SERVICE_HOST=auto: KUBERNETES_SERVICE_PORT is not set"):
        in_cluster({"KUBERNETES_SERVICE_HOST": "auto", "KUBERNETES_SERVICE_PORT": ""}, tmp_path)
    with pytest.raises(AccessError, match="token: missing"):
        in_cluster(env, tmp_path)
    (tmp_path / "token").write_text("t")
    found = in_cluster(env, tmp_path)
    assert found is not None
    assert found.servers == ("https://[fd00::1]:443",)
    assert (found.token_file, found.ca_file) == (tmp_path / "token", None)


def test_the_service_account_is_not_for_servers_in_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none to be read here, so a server that needs one is refused."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(AccessError, match="token: missing"):
        access_of(KubernetesSettings(k8s_api_server="https://10.0.0.1:6443"))
    for server in ("http://10.0.0.1:8080", "10.0.0.1:8080"):
        found = access_of(KubernetesSettings(k8s_api_server=server))
        assert found is not None
        assert (found.servers, found.token_file) == (("http://10.0.0.1:8080",), None)


async def test_a_watch_gives_what_comes_together_as_one(server: ApiServer, client: Client) -> None:
    server.add(node("a"))
    server.add(node("b"))
    with anyio.fail_after(30):
        async with client.watch(NODES, {"resourceVersion": "0"}, silence=5) as blocks:
            names: list[str] = []
            async for block in blocks:
                names += [NODES.decoder.decode(event.object).name for event in events(block)]
                if len(names) == 2:
                    break
    assert names == ["a", "b"]
