"""The state directory: written files, and how any contents are read."""

import json
import os
from base64 import b64encode
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cells.endpoint import DatapathConfiguration, Endpoint, State, StateFiles
from cells.endpoint.state.directory import json_in_header
from cells.endpoint.state.saved import UnreadableError, decode, encode
from tests.unit.endpoint.fakes import Node, request

KEYS = {
    *("ID", "ContainerName", "dockerID", "DockerNetworkID", "DockerEndpointID", "IfName", "IfIndex"),
    *("ContainerIfName", "DisableLegacyIdentifiers", "OpLabels", "LXCMAC", "IPv6", "IPv6IPAMPool", "IPv4"),
    *("IPv4IPAMPool", "NodeMAC", "SecLabel", "Options", "DNSRules", "DNSRulesV2", "DNSHistory", "DNSZombies"),
    *("K8sPodName", "K8sNamespace", "K8sUID", "DatapathConfiguration", "CiliumEndpointUID", "Properties"),
    "NetnsCookie",
}


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    made = tmp_path / "elsewhere"
    made.mkdir()
    return Node(made).create(request())


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    directory = tmp_path / "state"
    directory.mkdir()
    return StateFiles(directory)


def names(files: StateFiles) -> list[str]:
    return sorted(path.name for path in files.directory.iterdir())


def test_the_json_has_the_documented_keys_and_texts(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    saved = json.loads((files.directory / "1" / "ep_config.json").read_text())
    assert set(saved) == KEYS
    assert saved["LXCMAC"] == "02:00:00:00:01:01"
    assert saved["IPv4"] == "10.0.1.1"
    assert saved["IPv6"] == ""
    assert saved["SecLabel"]["id"] == 256
    assert saved["OpLabels"]["OrchestrationIdentity"]["io.kubernetes.pod.namespace"] == {
        "key": "io.kubernetes.pod.namespace",
        "value": "default",
        "source": "k8s",
    }
    assert len(saved["SecLabel"]["labelsSHA256"]) == 64


def test_what_is_written_is_read_again(files: StateFiles, endpoint: Endpoint) -> None:
    full = replace(
        endpoint,
        container_name="pause",
        info_labels=("k8s:pod-template-hash=1",),
        disable_legacy_identifiers=True,
        datapath=DatapathConfiguration(external_ipam=True, require_routing=False),
        netns_cookie=2**64 - 1,
        ipv6=IPv6Address("fd00::7"),
        ipv6_pool="default",
        network="cilium",
    )
    files.write(full)
    found = files.scan().endpoints[1].endpoint
    assert found.state is State.RESTORING
    restored = replace(full, state=found.state, created=found.created)
    assert found == restored


@given(
    st.builds(
        Endpoint,
        id=st.integers(1, 65535),
        container_id=st.text(),
        container_ifname=st.text(),
        ifname=st.text(),
        ifindex=st.integers(0, 2**31 - 1),
        pod_mac=st.binary(min_size=6, max_size=6),
        host_mac=st.binary(min_size=6, max_size=6),
        ipv4=st.none() | st.ip_addresses(v=4),
        pool=st.text(),
        ipv6=st.none() | st.ip_addresses(v=6),
        ipv6_pool=st.text(),
        network=st.text(),
        identity=st.integers(0, 2**32 - 1),
        labels=st.just(("k8s:a=b", "k8s:c")),
        pod_name=st.text(),
        pod_namespace=st.text(),
        pod_uid=st.text(),
        netns_cookie=st.integers(0, 2**64 - 1),
        state=st.just(State.RESTORING),
        created=st.just(1.5),
    )
)
def test_any_endpoint_survives_the_json(endpoint: Endpoint) -> None:
    assert decode(encode(endpoint), 1.5).endpoint == endpoint


@given(
    st.binary()
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_rubbish_is_unreadable_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode(data, 0.0)


def test_unknown_keys_are_ignored_and_missing_ones_have_defaults() -> None:
    saved = decode(b'{"ID": 7, "Options": {"map": {"Debug": 1}}, "DNSRules": {"53": []}, "Later": 1}', 0.0)
    assert saved.endpoint.id == 7
    assert saved.endpoint.ipv4 is None
    assert (
        decode(
            b'{"ID": 7, "OpLabels": null, "Properties": null, "DatapathConfiguration": null}', 0.0
        ).properties
        == {}
    )


def test_writing_again_switches_and_keeps_other_files(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    (files.directory / "1" / "template.txt").write_text("hello")
    (files.directory / "1_next_fail").mkdir()
    files.write(replace(endpoint, ipv4=IPv4Address("10.0.1.99")))
    assert names(files) == ["1"]
    assert (files.directory / "1" / "template.txt").read_text() == "hello"
    assert files.scan().endpoints[1].endpoint.ipv4 == IPv4Address("10.0.1.99")


def test_refreshing_writes_only_what_changed(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    before = (files.directory / "1").stat().st_ino
    files.refresh(endpoint)
    assert (files.directory / "1").stat().st_ino == before
    files.refresh(replace(endpoint, identity=300))
    assert (files.directory / "1").stat().st_ino != before


def test_a_failed_write_leaves_the_previous_state(
    files: StateFiles, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(endpoint)

    def refuse(*_: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr("cells.endpoint.state.directory._exchange", refuse)
    with pytest.raises(OSError, match="broken"):
        files.write(replace(endpoint, identity=300))
    assert names(files) == ["1"]
    assert files.scan().endpoints[1].endpoint.identity == 256


def test_a_leftover_of_an_interrupted_write_is_replaced(files: StateFiles, endpoint: Endpoint) -> None:
    (files.directory / "1_next").mkdir()
    (files.directory / "1_next" / "x").write_text("half")
    files.write(endpoint)
    assert names(files) == ["1"]


def test_removing_removes_all_forms_and_is_harmless_again(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    (files.directory / "1" / "bpf_lxc.o").write_text("x")
    (files.directory / "1_next_fail").mkdir()
    (files.directory / "1_next_fail" / "verifier.log").write_text("x")
    files.remove(1)
    files.remove(1)
    assert names(files) == []


def test_a_half_switched_endpoint_is_the_finished_one(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    os.rename(files.directory / "1", files.directory / "1_next")  # noqa: PTH104
    assert list(files.scan().endpoints) == [1]
    assert names(files) == ["1"]


@pytest.mark.parametrize("content", [None, "", '{"ID": 1', "[]"])
def test_a_write_that_never_finished_is_removed(files: StateFiles, content: str | None) -> None:
    (files.directory / "1_next").mkdir()
    if content is not None:
        (files.directory / "1_next" / "ep_config.json").write_text(content)
    scan = files.scan()
    assert (scan.endpoints, scan.unreadable, scan.removed) == ({}, {}, ["1_next"])
    assert names(files) == []


def test_building_directories_beside_their_endpoint_are_removed(
    files: StateFiles, endpoint: Endpoint
) -> None:
    files.write(endpoint)
    for suffix in ("_next", "_next_fail"):
        (files.directory / f"1{suffix}").mkdir()
    scan = files.scan()
    assert list(scan.endpoints) == [1]
    assert sorted(scan.removed) == ["1_next", "1_next_fail"]
    assert names(files) == ["1"]


def test_an_unreadable_endpoint_is_reported_and_left(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    (files.directory / "1" / "ep_config.json").write_text('{"ID": 1, "IPv4"')
    (files.directory / "2").mkdir()
    (files.directory / "2" / "ep_config.h").write_text("/* CILIUM_BASE64 */")
    scan = files.scan()
    assert list(scan.unreadable) == [1, 2]
    assert "ep_config.json" in scan.unreadable[1]
    assert names(files) == ["1", "2"]


def header(endpoint: Endpoint, line: str = " * CILIUM_BASE64_{version}:{state}") -> str:
    """An ep_config.h as agents before 1.16 wrote it."""
    version, state = b64encode(b"1.15.4 go1.21").decode(), b64encode(encode(endpoint)).decode()
    state_line = line.format(version=version, state=state)
    return (
        f"/*\n * This file is generated: do not modify.\n{state_line}\n * Container ID: cid1\n"
        f" * IPv4 address: {endpoint.ipv4}\n * Identity: 256\n */\n#define LXC_ID 1\n"
    )


def test_the_older_form_is_read_where_the_newer_does_not_exist(files: StateFiles, endpoint: Endpoint) -> None:
    old = files.directory / "1"
    old.mkdir()
    (old / "ep_config.h").write_text(header(endpoint))
    (found,) = files.scan().endpoints.values()
    assert found.endpoint.ipv4 == endpoint.ipv4
    files.refresh(found.endpoint)
    assert sorted(path.name for path in old.iterdir()) == ["ep_config.h", "ep_config.json"]


def test_the_older_form_is_not_read_instead_of_a_broken_newer_one(
    files: StateFiles, endpoint: Endpoint
) -> None:
    files.write(endpoint)
    (files.directory / "1" / "ep_config.h").write_text(header(endpoint))
    (files.directory / "1" / "ep_config.json").write_text("")
    scan = files.scan()
    assert (scan.endpoints, list(scan.unreadable)) == ({}, [1])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (" * CILIUM_BASE64_{version}:{state}:", "single ':', it has 2"),
        (" * CILIUM_BASE64_{version}{state}", "single ':', it has 0"),
        (" * CILIUM_BASE64_{version}:{state}?", "is not base64"),
        (" * CILIUM_BASE64_{version}:{version}", "not an endpoint's state"),
        (" * Container Interface: eth0", "no line with CILIUM_BASE64_"),
    ],
)
def test_an_older_form_that_is_none_is_unreadable(
    files: StateFiles, endpoint: Endpoint, line: str, fault: str
) -> None:
    (files.directory / "1").mkdir()
    (files.directory / "1" / "ep_config.h").write_text(header(endpoint, line))
    assert fault in files.scan().unreadable[1]


@given(st.binary() | st.binary().map(lambda rest: b" * CILIUM_BASE64_" + rest))
def test_a_rubbish_header_is_unreadable_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode(json_in_header(data), 0.0)


def test_the_directory_with_the_endpoints_number_wins(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    other = files.directory / "15"
    other.mkdir()
    (other / "ep_config.json").write_bytes(encode(replace(endpoint, identity=300)))
    scan = files.scan()
    assert scan.endpoints[1].endpoint.identity == 256
    assert scan.ignored == ["15"]


def test_a_misnamed_directory_gets_its_proper_name(files: StateFiles, endpoint: Endpoint) -> None:
    files.write(endpoint)
    (files.directory / "1").rename(files.directory / "15")
    assert list(files.scan().endpoints) == [1]
    assert names(files) == ["1"]


def test_a_delete_that_was_interrupted_is_finished(files: StateFiles) -> None:
    (files.directory / "7").mkdir()
    assert files.scan().removed == ["7"]
    assert names(files) == []


def test_other_names_are_not_looked_at(files: StateFiles) -> None:
    for name in ("globals", "templates", "0", "007", "65536", "12_old"):
        (files.directory / name).mkdir()
    (files.directory / "13").write_text("a file")
    scan = files.scan()
    assert (scan.endpoints, scan.unreadable, scan.removed) == ({}, {}, [])
    assert len(names(files)) == 7
