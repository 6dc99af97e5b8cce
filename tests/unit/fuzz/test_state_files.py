"""Arbitrary state directories: a start reads valid files and reports others, without delay."""

from __future__ import annotations

import json
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from anyio.from_thread import start_blocking_portal
from hypothesis import example, given
from hypothesis import strategies as st

from cells.cni import DeleteQueue, QueueLock
from cells.cni.configuration.contents import NoTargetError, find_target, splice
from cells.config import read_pidfile
from cells.endpoint.kernel import config_row, ipcache_claims, lxc_value
from cells.endpoint.state.directory import StateFiles
from cells.endpoint.state.saved import encode
from cells.node.ipam.settings import save_ranges, saved_ranges
from cells.node.router import previous_addresses
from lifecycle import Lifecycle
from lifecycle.settings.regular import LARGEST
from tests.unit.cni_server.harness import Harness, harness
from tests.unit.fuzz.folders import Holding, Put, a_device, a_pipe, instead, put
from tests.unit.fuzz.inputs import bounded, damaged, nested, odd_bytes

ENDPOINT = {
    "ID": 7,
    "dockerID": "cid1",
    "IfName": "lxc0123456789ab",
    "IfIndex": 12,
    "ContainerIfName": "eth0",
    "OpLabels": {"OrchestrationIdentity": {"app": {"key": "app", "value": "web", "source": "k8s"}}},
    "LXCMAC": "02:00:00:00:00:02",
    "NodeMAC": "02:00:00:00:00:01",
    "IPv4": "10.0.1.77",
    "IPv6": "fd00::77",
    "SecLabel": {"id": 104, "labels": {}, "labelsSHA256": ""},
    "K8sPodName": "web-0",
    "K8sNamespace": "default",
    "DatapathConfiguration": {"external-ipam": True, "require-routing": None},
    "Properties": {"property-cni-network": "cilium"},
    "NetnsCookie": 4242,
    "DNSHistory": [{"fqdn": "a.example.", "lookup-time": "2024-05-06T07:08:09Z", "ttl": 5, "ips": ["::1"]}],
    "DNSZombies": {"deletes": {"192.0.2.2": {"names": ["b."], "delete-pending-at": "2024-05-06T07:08:09Z"}}},
}
WHOLE = json.dumps(ENDPOINT).encode()


def in_header(data: bytes) -> bytes:
    """The older form."""
    return b"/*\n * CILIUM_BASE64_1.16.0:" + b64encode(data) + b"\n */\n"


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="state-") as made:
        yield Path(made)


# What stands where a file should be


names = st.sampled_from(["7", "8", "65535", "65536", "0", "7_next", "7_next_fail", "9_next", "07", "٣", "x"])
files = st.sampled_from(["ep_config.json", "ep_config.h", "other"])
contents = damaged(ENDPOINT) | damaged(ENDPOINT).map(in_header) | st.just(WHOLE)


@bounded(180)
@example({"7": {"ep_config.json": Holding(WHOLE[:-1] + b"," + nested(900)[1:])}})
@example({"7": {"ep_config.json": a_pipe}, "8": {"ep_config.h": a_device}})
@given(st.dictionaries(names, st.dictionaries(files, put(contents), max_size=2), max_size=4))
def test_endpoint_directories_are_read_or_reported_unreadable(tree: dict[str, dict[str, Put]]) -> None:
    with directory() as state:
        for name, inside in tree.items():
            (state / name).mkdir()
            for file, make in inside.items():
                make(state / name / file)
        read = StateFiles(state)
        scan = read.scan()
        for number in scan.endpoints:
            with suppress(ValueError):
                read.keep_names(scan.endpoints[number].endpoint, read.names(number))
        assert not {str(number) for number in scan.unreadable} - {entry.name for entry in state.iterdir()}
        for number, saved in scan.endpoints.items():
            endpoint = saved.endpoint
            assert endpoint.id == number
            config_row(endpoint, any_source=False)
            for claim in ipcache_claims(endpoint):
                claim.value.pack()
            lxc_value(endpoint).pack()
            StateFiles(state).write(endpoint)
            assert encode(StateFiles(state).scan().endpoints[number].endpoint) == encode(endpoint)


@bounded(80)
@given(put(damaged({"ipv4": "10.0.0.0/24", "ipv6": "fd00::/112"})))
def test_saved_pod_ranges_are_read_or_replaced(make: Put) -> None:
    with directory() as state:
        path = state / "pod-ranges.json"
        make(path)
        ranges = saved_ranges(state, structlog.get_logger())
        if not path.is_dir():
            save_ranges(state, ranges)
            assert saved_ranges(state, structlog.get_logger()) == ranges


header_lines = st.lists(
    st.sampled_from(
        [
            b"cilium.v4.internal.raw " + b"0x1 " * 16,
            b"#define IPV4_GATEWAY 0xffffffff",
            b" ROUTER_IP 0xfff 0x",
            b"cilium.v6.internal.raw " + b"0xff, " * 99,
        ]
    )
    | st.binary(max_size=30),
    max_size=5,
).map(b"\n".join)


@bounded(60)
@given(put(header_lines))
def test_the_routers_past_is_read_or_left(make: Put) -> None:
    with directory() as state:
        make(state / "node_config.h")
        assert len(previous_addresses(None, [], state / "node_config.h", structlog.get_logger())) <= 2


@bounded(40)
@given(put(st.sampled_from([b"12\n", b"", "٣".encode(), b"\xff", b"-1", b"1" * 200]) | odd_bytes))
def test_a_pidfile_names_a_process_or_none(make: Put) -> None:
    with directory() as state:
        make(state / "cilium.pid")
        assert read_pidfile(state / "cilium.pid") in {"", "12"} | {str(n) for n in range(10)}


CONFIGURATION = {"cniVersion": "1.0.0", "name": "net", "type": "bridge", "plugins": [{"type": "bridge"}]}


@bounded(100)
@given(put(damaged(CONFIGURATION)), st.sampled_from(["net", "*"]))
def test_a_configuration_to_chain_onto_is_found_or_skipped(make: Put, network: str) -> None:
    skipped: list[str] = []
    with directory() as place:
        make(place / "10-net.conflist")
        try:
            text = find_target(place, network, "05-cilium.conflist", skipped.append)
        except NoTargetError:
            return
    spliced = json.loads(splice(text, {"type": "cilium-cni"}))
    assert spliced["plugins"][-1] == {"type": "cilium-cni"}


queued = damaged({"container-id": "cid1"}) | st.sampled_from(
    [b"cni-attachment-id:cid1:eth0", b'{"container-id":"\xff"}', b"ipv4:\xff", b"\0", b"a" * 5000]
)


async def drained(made: Harness) -> None:
    """What an agent does at its start and, once it serves, lets plugins do."""
    lifecycle = Lifecycle("test")
    place, log = made.folder / "deleteQueue", structlog.get_logger()
    queue = QueueLock(place, lifecycle, log, 0.0)
    DeleteQueue(place, made.detacher, lifecycle, log)
    lock, drain = lifecycle.specs
    async with lock.context(), drain.context():
        assert queue.held
        queue.release()


@bounded(100)
@given(st.lists(put(queued), max_size=3), st.sampled_from(["lockfile", "elsewhere"]), instead)
def test_queued_delete_files_are_done_or_skipped(files: list[Put], odd_name: str, odd: Put) -> None:
    with (
        directory() as folder,
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(harness(folder)) as made,
    ):
        queue = folder / "deleteQueue"
        queue.mkdir()
        for position, make in enumerate(files):
            make(queue / f"{position}.delete")
        if odd_name == "elsewhere":
            odd(queue / odd_name)
        portal.call(drained, made)
        left = [path for path in queue.glob("*.delete") if path.is_file()]
        assert all(path.stat().st_size > LARGEST or path.is_symlink() for path in left)
