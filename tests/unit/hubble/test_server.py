"""Hubble's sockets with grpcio and hive's own client, with TLS and without its files."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import ssl
import stat
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.hubble.codec import decode, encode, to_json
from cells.hubble.rpc.observer import (
    ChangeNotification,
    GetFlowsRequest,
    GetFlowsResponse,
    NotifyRequest,
    ServerStatusRequest,
)
from cells.hubble.rpc.reflection import ReflectionRequest, ReflectionResponse
from cells.hubble.rpc.server import HubbleServer, HubbleServerSettings, ServerCertificates
from cells.hubble.rpc.services import Peers, PeerSettings
from hive.observe.hubble import run
from lifecycle import (
    Change,
    HealthTree,
    StartError,
)
from lifecycle.testing import eventually
from tests.support.apiserver.certificates import Authority
from tests.support.ports import free_port
from tests.support.recordings import recordings
from tests.unit.hubble.serving import degraded, in_thread, serving

pytestmark = pytest.mark.anyio
DATA = recordings("hubble")
RECORDED = json.loads((DATA / "cli.json").read_text())
NAME = "api.test"
"""A name that the certificates of the tests cover."""


def hubble(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    return code, out.getvalue(), err.getvalue()


async def test_the_unix_socket_answers_grpcio(tmp_path: Path) -> None:
    async with serving(tmp_path):
        path = tmp_path / "hubble.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660

        def calls() -> None:
            with grpc.insecure_channel(f"unix:{path}") as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check")
                assert check(b"\x0a\x16hubble.server.Observer", timeout=10) == b"\x08\x01"
                with pytest.raises(grpc.RpcError) as unknown:
                    check(b"\x0a\x01x", timeout=10)
                assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
                answers = channel.unary_stream("/observer.Observer/GetFlows")(
                    encode(GetFlowsRequest(number=2))
                )
                uuids = [decode(GetFlowsResponse, one).flow.uuid for one in answers]  # type: ignore[union-attr]
                assert uuids == ["flow-1", "flow-2"]
                with pytest.raises(grpc.RpcError) as absent:
                    channel.unary_unary("/observer.Observer/GetNodes")(b"", timeout=10)
                assert absent.value.details() == "GetNodes not implemented"
                peers = channel.unary_stream("/peer.Peer/Notify")(encode(NotifyRequest()))
                assert decode(ChangeNotification, next(peers)).name == "n1"
                peers.cancel()

        await in_thread(calls)
    assert not path.exists()


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_what_is_served_can_be_learned_by_reflection(tmp_path: Path, package: str) -> None:
    async with serving(tmp_path):

        def calls() -> None:
            with grpc.insecure_channel(f"unix:{tmp_path / 'hubble.sock'}") as channel:
                info = channel.stream_stream(f"/{package}.ServerReflection/ServerReflectionInfo")

                def ask(*requests: ReflectionRequest) -> list[ReflectionResponse]:
                    answers = info((encode(one) for one in requests), timeout=20)
                    return [decode(ReflectionResponse, one) for one in answers]

                (listed,) = ask(ReflectionRequest(list_services=""))
                assert listed.list_services_response is not None
                services = [one.name for one in listed.list_services_response.service]
                assert services == [
                    *("grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"),
                    *("grpc.reflection.v1alpha.ServerReflection", "observer.Observer", "peer.Peer"),
                ]
                pool = DescriptorPool()
                described: dict[str, bytes] = {}
                for answer in ask(*(ReflectionRequest(file_containing_symbol=name) for name in services)):
                    assert answer.file_descriptor_response is not None
                    for one in answer.file_descriptor_response.file_descriptor_proto:
                        described[FileDescriptorProto.FromString(one).name] = one

                def add(name: str) -> None:
                    data = described.pop(name, None)
                    if data is not None:
                        for needed in FileDescriptorProto.FromString(data).dependency:
                            add(needed)
                        pool.AddSerializedFile(data)

                for name in list(described):
                    add(name)
                methods = {name: pool.FindServiceByName(name).methods_by_name for name in services}
                asked = methods["observer.Observer"]["GetFlows"].input_type.fields_by_name
                assert asked["whitelist"].message_type.full_name == "flow.FlowFilter"
                assert methods[f"{package}.ServerReflection"]["ServerReflectionInfo"].client_streaming
                (unknown,) = ask(ReflectionRequest(file_by_filename="x.proto"))
                assert unknown.error_response is not None
                assert unknown.error_response.error_code == 5

        await in_thread(calls)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (
            GetFlowsRequest(first=True, follow=True),
            grpc.StatusCode.INVALID_ARGUMENT,
            "first cannot be specified with follow",
        ),
        (GetFlowsRequest(field_mask=["nope"]), grpc.StatusCode.UNKNOWN, "invalid fieldmask"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(
    tmp_path: Path, request_: GetFlowsRequest, code: grpc.StatusCode, text: str
) -> None:
    async with serving(tmp_path):

        def calls() -> None:
            with grpc.insecure_channel(f"unix:{tmp_path / 'hubble.sock'}") as channel:
                with pytest.raises(grpc.RpcError) as refused:
                    list(channel.unary_stream("/observer.Observer/GetFlows")(encode(request_), timeout=10))
                assert (refused.value.code(), refused.value.details()) == (code, text)

        await in_thread(calls)


YEARS = "timestamp is not between 0001-01-01 and 9999-12-31"
LAST = 253_402_300_799_999_999_999
"""The end of the year 9999, in nanoseconds since 1970."""


@pytest.mark.parametrize("rpc", ["GetFlows", "GetAgentEvents", "GetDebugEvents"])
@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (encode(GetFlowsRequest(since=LAST + 1)), f"since: {YEARS}"),
        (encode(GetFlowsRequest(since=0, until=LAST + 1)), f"until: {YEARS}"),
        (encode(GetFlowsRequest(until=-62_135_596_801_000_000_000)), f"until: {YEARS}"),
        (b"\x3a\x06\x10\x80\x94\xeb\xdc\x03", f"since: {YEARS}"),  # a billion nanoseconds
        (b"\x3a\x0b\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", f"since: {YEARS}"),  # -1 nanoseconds
        (encode(GetFlowsRequest(since=-62_135_596_800_000_000_000, until=LAST)), ""),
    ],
)
async def test_times_outside_of_the_range_of_timestamps_are_refused(
    tmp_path: Path, rpc: str, request_: bytes, refusal: str
) -> None:
    async with serving(tmp_path):

        def calls() -> None:
            with grpc.insecure_channel(f"unix:{tmp_path / 'hubble.sock'}") as channel:
                answers = channel.unary_stream(f"/observer.Observer/{rpc}")(request_, timeout=10)
                if not refusal:
                    list(answers)
                    return
                with pytest.raises(grpc.RpcError) as refused:
                    list(answers)
                assert refused.value.code() == grpc.StatusCode.UNKNOWN
                assert refused.value.details() == refusal

        await in_thread(calls)


def _requests(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client of a case asked, or what the relay asked nodes for it."""
    of_nodes = [request for node in case.get("requests_at_nodes") or () for request in node or ()]
    return [*(case.get("requests") or ()), *of_nodes]


async def test_every_request_of_ciliums_clients_is_accepted(tmp_path: Path) -> None:
    wires = {
        (request["method"], request["request_wire"])
        for file in ("cli.json", "cli_client1.19.json", "relay.json")
        for case in json.loads((DATA / file).read_text())["cases"]
        for request in _requests(case)
        if not {"--cel-expression", "-t trace"} & {*case.get("argv", ()), " ".join(case.get("argv", ())[3:5])}
        and "GetNodes" not in request["method"]
    }
    async with serving(tmp_path):

        def calls() -> None:
            with grpc.insecure_channel(f"unix:{tmp_path / 'hubble.sock'}") as channel:
                for method, wire in sorted(wires):
                    stream = channel.unary_stream(f"/{method}")(bytes.fromhex(wire), timeout=0.5)
                    try:
                        list(stream)
                    except grpc.RpcError as error:
                        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, (method, wire, error)  # noqa: PT017

        await in_thread(calls)


async def test_hive_observe_shows_the_flows(tmp_path: Path) -> None:
    server = f"unix://{tmp_path / 'hubble.sock'}"
    async with serving(tmp_path):
        code, out, err = await in_thread(
            lambda: hubble("observe", "--server", server, "--verdict", "DROPPED")
        )
        assert (code, err) == (0, "")
        assert out.startswith("Nov 14 22:13:21.000: ")
        assert "DROPPED" in out
        code, out, _ = await in_thread(lambda: hubble("status", "--server", server))
        assert (code, out.splitlines()[1]) == (0, "Current/Max Flows: 3/7 (42.86%)")


def tls_settings(folder: Path, port: int) -> dict[str, object]:
    return {
        "hubble-listen-address": f"127.0.0.1:{port}",
        "hubble-tls-cert-file": str(folder / "server.crt"),
        "hubble-tls-key-file": str(folder / "server.key"),
        "hubble-tls-client-ca-files": (str(folder / "ca.crt"),),
    }


def flags(port: int, ca: Path, certificate: tuple[Path, Path] | None) -> list[str]:
    words = ["--server", f"tls://127.0.0.1:{port}", "--tls-ca-cert-files", str(ca), "--tls-server-name", NAME]
    if certificate is not None:
        words += ["--tls-client-cert-file", str(certificate[0]), "--tls-client-key-file", str(certificate[1])]
    return words


async def test_the_port_takes_clients_with_a_certificate_alone(tmp_path: Path) -> None:
    authority, port = Authority(tmp_path), free_port()
    authority.issue("server", "/CN=server")
    client = authority.issue("client", "/CN=relay")
    async with serving(tmp_path, **tls_settings(tmp_path, port)):
        known = flags(port, authority.certificate, client)
        code, out, err = await in_thread(lambda: hubble("status", *known))
        assert (code, err) == (0, ""), out
        unknown = flags(port, authority.certificate, None)
        code, out, err = await in_thread(lambda: hubble("status", *unknown))
        assert code == 1
        assert "certificate" in err
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.load_cert_chain(*client)
        with pytest.raises((ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream)):
            await anyio.connect_tcp("127.0.0.1", port, tls=True, ssl_context=old, tls_hostname=NAME)


async def test_files_that_change_are_read_for_the_next_client(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second, tmp_path / "used"):
        folder.mkdir()
    authorities = [Authority(folder) for folder in (first, second)]
    clients = [authority.issue("client", "/CN=relay") for authority in authorities]
    for authority in authorities:
        authority.issue("server", "/CN=server")
    port = free_port()

    def use(folder: Path) -> None:
        for name in ("server.crt", "server.key", "ca.crt"):
            shutil.copy(folder / name, tmp_path / "used" / f"{name}.new")
            (tmp_path / "used" / f"{name}.new").replace(tmp_path / "used" / name)

    def status(number: int) -> int:
        words = flags(port, authorities[number].certificate, clients[number])
        return hubble("status", *words)[0]

    async with serving(tmp_path, **tls_settings(tmp_path / "used", port)) as hive:
        health = hive.get(HealthTree)
        assert any("hubble-tls files cannot be used" in one.message for one in health.snapshot())
        assert not hive.get(HubbleServer).ready
        assert await in_thread(partial(status, 0)) == 1
        use(first)
        assert [await in_thread(partial(status, number)) for number in (0, 1)] == [0, 1]
        assert hive.get(HubbleServer).ready
        use(second)
        assert [await in_thread(partial(status, number)) for number in (0, 1)] == [1, 0]
        (tmp_path / "used" / "server.key").write_text("half")
        await eventually(lambda: "the last good ones are" in degraded(hive, ""))
        assert hive.get(HubbleServer).ready
        assert [await in_thread(partial(status, number)) for number in (0, 1)] == [1, 0]
        use(second)
        await eventually(lambda: not degraded(hive, ""))


async def test_files_that_are_broken_leave_the_last_ones_in_force(tmp_path: Path) -> None:
    Authority(tmp_path).issue("server", "/CN=server")
    certificates = ServerCertificates(str(tmp_path / "server.crt"), str(tmp_path / "server.key"), [], "h2")
    before = certificates.context()
    (tmp_path / "server.key").write_text("half")
    assert certificates.context() is before
    assert before.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])
async def test_without_tls_the_port_serves_anybody(tmp_path: Path, host: str) -> None:
    port = free_port()
    settings = {"hubble-listen-address": f"{host}:{port}", "hubble-disable-tls": True}
    async with serving(tmp_path, **settings):
        assert (await in_thread(lambda: hubble("status", "--server", f"127.0.0.1:{port}")))[0] == 0
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(StartError, match=r"hubble-listen-address: \S+:\d+ cannot be served"):
            async with serving(other, **settings):
                pass


def test_tls_without_files_is_refused() -> None:
    with pytest.raises(ValueError, match="hubble-listen-address without hubble-tls-cert-file"):
        HubbleServerSettings(hubble_listen_address=":4244").validate()


PEERS = json.loads((DATA / "peer.json").read_text())["cases"]


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one["name"]) for one in PEERS if "notifications" in one]
)
def test_nodes_are_announced_as_recorded(case: dict[str, Any]) -> None:
    peers = Peers(
        PeerSettings(
            port=case["listen_port"],
            prefer_ipv6=case["hubble_prefer_ipv6"],
            tls=not case["hubble_disable_tls"],
        )
    )
    found: list[Any] = []
    for number, event in enumerate(case["node_events"] or []):
        if "old" in event:
            list(peers.notifications([Change("n", None, recorded_node(event["old"]), number)]))
        row = None if event["op"] == "delete" else recorded_node(event["node"])
        if event["op"] == "delete":
            list(peers.notifications([Change("n", None, recorded_node(event["node"]), number)]))
        found += [to_json(one) for one in peers.notifications([Change("n", None, row, number)])]
    assert found == case["notifications"]


def recorded_node(tree: dict[str, Any]) -> ClusterNode:
    addresses = tuple(NodeIP(one["type"], ip_address(one["ip"])) for one in tree["addresses"] or [])
    return ClusterNode(
        cluster=tree["cluster"], name=tree["name"], source=Source.CUSTOM_RESOURCE, addresses=addresses
    )


def test_the_request_for_the_status_is_empty() -> None:
    assert encode(ServerStatusRequest()) == b""
