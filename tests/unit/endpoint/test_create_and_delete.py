"""Creation and removal of endpoints: in order, and all or nothing."""

from ipaddress import IPv4Address
from pathlib import Path

import pytest
from msgspec.structs import replace

from cells.endpoint import Code, DatapathConfiguration, EndpointError, State
from cells.maps.policy_maps import PoolEmpty
from tests.unit.endpoint.fakes import Node, request

IP = IPv4Address("10.0.1.1")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_new_endpoint_is_in_maps_on_disk_and_in_the_table(node: Node) -> None:
    endpoint = node.create(request())
    assert endpoint.id == 1
    assert endpoint.state is State.READY
    assert endpoint.labels == (
        "k8s:io.cilium.k8s.policy.cluster=default",
        "k8s:io.kubernetes.pod.namespace=default",
    )
    assert endpoint.identity == 256
    assert endpoint.pool == "default"
    assert node.kernel.policies[1].filled
    assert node.kernel.configs == {101: 1}
    assert node.kernel.lxc == {IP: 1}
    assert node.kernel.ipcache == {IP: 256}
    assert node.kernel.attached == [101]
    assert node.saved == ["1"]
    assert node.table.all() == [endpoint]


def test_policy_comes_first_and_the_program_after_the_rows_it_reads(node: Node) -> None:
    node.create(request())
    steps = [step for step in node.kernel.steps if step != "adopt"]
    assert steps == ["acquire", "fill", "put_config", "put_lxc", "put_ipcache", "attach"]


STEPS = ["acquire", "fill", "put_config", "put_lxc", "put_ipcache", "attach"]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_nothing(node: Node, step: str) -> None:
    node.kernel.refuse = step
    with pytest.raises(EndpointError, match=f"no {step} today") as caught:
        node.create(request())
    assert caught.value.status == 500
    assert node.kernel.is_clean
    assert node.saved == []
    assert node.table.all() == []
    assert node.identities.get(256) is None
    node.kernel.refuse = ""
    assert node.create(request()).state is State.READY


def test_a_full_disk_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr("cells.endpoint.state.directory._write", full)
    with pytest.raises(EndpointError, match="No space left"):
        node.create(request())
    assert node.kernel.is_clean
    assert node.saved == []


def test_a_wrong_expiration_uuid_undoes_the_endpoint(node: Node) -> None:
    node.addresses.timers[IP] = "right"
    with pytest.raises(EndpointError, match="UUID mismatch") as caught:
        node.create(request(expiration_uuid="wrong"))
    assert caught.value.status == 500
    assert node.kernel.is_clean
    assert node.saved == []
    node.create(request(expiration_uuid="right"))
    assert node.addresses.timers == {}


def test_rolling_back_goes_on_when_a_step_back_fails_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "broken")

    node.kernel.refuse = "attach"
    monkeypatch.setattr(node.kernel, "drop_lxc", refuse)
    with pytest.raises(EndpointError, match="no attach today"):
        node.create(request())
    assert node.kernel.policies == {}
    assert node.kernel.configs == {}


def test_an_empty_pool_is_the_callers_to_wait_for(node: Node) -> None:
    node.kernel.pool.clear()
    with pytest.raises(PoolEmpty):
        node.create(request())
    assert node.kernel.is_clean


def test_attachment_and_address_are_unique(node: Node) -> None:
    node.create(request())
    with pytest.raises(
        EndpointError, match="endpoint for CNI attachment ID cid1:eth0 already exists"
    ) as caught:
        node.create(request(ipv4=IPv4Address("10.0.1.9")))
    assert caught.value.status == 400
    with pytest.raises(EndpointError, match=r"IP ipv4:10\.0\.1\.1 is already in use") as caught:
        node.create(request(2, ipv4=IP))
    assert caught.value.status == 400
    assert len(node.kernel.policies) == 1


def test_reserved_and_meaningless_labels_are_refused(node: Node) -> None:
    with pytest.raises(EndpointError, match="not allowed to add reserved labels: reserved:host") as caught:
        node.create(request(labels=("reserved:host",)))
    assert caught.value.status == 400
    with pytest.raises(EndpointError, match="no valid labels provided"):
        node.create(request(labels=("k8s:pod-template-hash=1",)))
    assert node.kernel.is_clean


def test_given_labels_join_those_of_the_pod(node: Node) -> None:
    endpoint = node.create(request(labels=("k8s:app=web", "k8s:pod-template-hash=1")))
    assert endpoint.labels == (
        "k8s:app=web",
        "k8s:io.cilium.k8s.policy.cluster=default",
        "k8s:io.kubernetes.pod.namespace=default",
    )
    assert endpoint.info_labels == ("k8s:pod-template-hash=1",)


def test_an_endpoint_without_a_pod_has_identity_init(node: Node) -> None:
    endpoint = node.create(request(pod_name="", pod_namespace="", pod_uid=""))
    assert (endpoint.identity, endpoint.labels) == (5, ("reserved:init",))
    assert node.endpoints.delete(endpoint) == ()


def test_pods_of_a_namespace_share_an_identity_until_the_last_is_deleted(node: Node) -> None:
    one, two = node.create(request(1)), node.create(request(2))
    assert one.identity == two.identity
    node.endpoints.delete(one)
    assert node.identities.get(two.identity) is not None
    node.endpoints.delete(two)
    assert node.identities.get(two.identity) is None


def test_deleting_removes_everything_and_releases_the_address(node: Node) -> None:
    endpoint = node.create(request())
    node.kernel.steps.clear()
    assert node.endpoints.delete(endpoint) == ()
    assert node.kernel.steps == ["drop_lxc", "drop_ipcache", "drop_config", "release"]
    assert node.kernel.is_clean
    assert node.saved == []
    assert node.table.all() == []
    assert node.endpoints.lookup("1") is None
    assert node.addresses.released == [(IP, "default")]
    assert node.scrub.flows == [IP]


def test_the_address_can_be_left_to_the_caller(node: Node) -> None:
    node.endpoints.delete(node.create(request()), release_address=False)
    assert node.addresses.released == []


def test_an_address_of_another_ipam_is_never_released(node: Node) -> None:
    external = DatapathConfiguration(external_ipam=True)
    endpoint = node.create(request(datapath=external))
    assert endpoint.pool == ""
    node.endpoints.delete(endpoint)
    assert node.addresses.released == []


def test_deleting_twice_harms_no_later_endpoint(node: Node) -> None:
    node.kernel.pool = [1]
    first = node.create(request())
    node.endpoints.delete(first)
    second = node.create(request())
    assert second.id == first.id
    assert node.endpoints.delete(first) == ()
    assert node.endpoints.get(second.id) == second
    assert node.kernel.lxc == {IP: 1}


def test_a_failed_delete_step_is_reported_and_the_others_run(node: Node) -> None:
    endpoint = node.create(request())
    node.kernel.refuse = "drop_lxc"
    errors = node.endpoints.delete(endpoint)
    assert len(errors) == 1
    assert errors[0].startswith("cilium_lxc: ")
    assert node.kernel.ipcache == {}
    assert node.kernel.configs == {}
    assert node.saved == []


def test_the_status_log_lists_the_creation_newest_first(node: Node) -> None:
    endpoint = node.create(request())
    entries = node.endpoints.status(endpoint.id).entries()
    assert entries[0].state is State.READY
    assert entries[-1].message == "Endpoint creation"
    assert {entry.code for entry in entries} == {Code.OK}
    assert node.endpoints.shown_state(endpoint) is State.READY


def test_a_failed_regeneration_shows_not_ready_until_a_retry_works(node: Node) -> None:
    endpoint = node.create(request())
    node.endpoints.delete(endpoint, release_address=False)
    node.policies.adopt(endpoint.id)
    node.endpoints.expose([replace(endpoint, state=State.RESTORING)])
    node.kernel.refuse = "put_lxc"
    assert node.build(endpoint.id) == "[Errno 12] no put_lxc today"
    failed = node.endpoints.get(endpoint.id)
    assert failed is not None
    assert node.endpoints.shown_state(failed) is State.NOT_READY
    assert node.build(endpoint.id) != ""
    node.kernel.refuse = ""
    assert node.build(endpoint.id) == ""
    again = node.endpoints.get(endpoint.id)
    assert again is not None
    assert node.endpoints.shown_state(again) is State.READY
    assert node.policies.status(endpoint.id).revision == 1
    assert (node.endpoints.builds.succeeded, node.endpoints.builds.failed) == (2, 2)
    node.endpoints.delete(again)
    assert node.recovery.stopped == [endpoint.id, endpoint.id]
    assert node.build(endpoint.id) == "not now"
