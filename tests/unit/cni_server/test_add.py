"""ADD over a real socket and a fake node is atomic."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from cells.cni.add import DELETED
from cells.cni.attach import host_link_name
from cells.cni.protocol import RESERVES_PORTS, PluginAction
from lifecycle.testing import eventually
from tests.unit.cni_server.fakes import GATEWAY, MTU, leftover
from tests.unit.cni_server.harness import Harness

pytestmark = pytest.mark.anyio
BAD_MAC = "unable to set MAC address on interface eth0: address {}: invalid MAC address"


def test_host_links_are_named_by_the_digest_of_the_attachment() -> None:
    assert host_link_name("0123456789abcdef", "eth0") == "lxc36c836995d35"
    assert host_link_name("cid1", "eth0") == "lxcf40c2f56efbe"


async def test_a_pod_is_attached_with_its_link_up_last(served: Harness) -> None:
    reply = await served.call("ADD")
    node = served.node
    assert reply.code == 0
    assert node.steps == [
        "allocate",
        "create_veth",
        "create endpoint",
        "activate",
        "configure",
        "sync carrier",
    ]
    ((index, link),) = node.links.items()
    ((number, endpoint),) = node.book.items()
    assert (link.host_name, link.up, link.alias, link.mtu) == (
        "lxcf40c2f56efbe",
        True,
        f"hive endpoint {number}",
        MTU,
    )
    assert link.configured == (endpoint.ipv4, GATEWAY, MTU)
    assert (endpoint.ifname, endpoint.ifindex) == (link.host_name, index)
    assert (endpoint.container_id, endpoint.container_ifname) == ("cid1", "eth0")
    assert (endpoint.pod_namespace, endpoint.pod_name, endpoint.netns_cookie) == (
        "default",
        "web-0",
        link.pod,
    )
    assert node.owners == ["default/web-0"]
    interfaces = reply.json["interfaces"]
    assert interfaces[0] == {"name": link.host_name, "mac": endpoint.host_mac.hex(":")}
    assert interfaces[1] == {
        "name": "eth0",
        "mac": endpoint.pod_mac.hex(":"),
        "sandbox": "/var/run/netns/pod1",
    }
    assert reply.json["ips"] == [{"interface": 1, "address": f"{endpoint.ipv4}/32", "gateway": "10.0.1.5"}]


async def test_without_kubernetes_the_address_has_no_owner_pod(served: Harness) -> None:
    assert (await served.call("ADD", CNI_ARGS="")).code == 0
    assert served.node.owners == ["/"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("allocate", "unable to allocate IP via local cilium agent: range is full"),
        (
            "create_veth",
            "unable to set up veth on host side: unable to create veth pair: cannot allocate memory",
        ),
        ("create endpoint", "unable to create endpoint: build failed"),
        ("configure", "unable to configure interfaces in container namespace: error configuring IPv4: "),
        ("activate", "unable to set up veth on host side: "),
        ("sync carrier", "unable to set up veth on host side: "),
    ],
)
async def test_a_failure_at_any_step_leaves_nothing(served: Harness, step: str, message: str) -> None:
    served.node.refuse.add(step)
    reply = await served.call("ADD")
    assert (reply.code, reply.json["code"], reply.json["cniVersion"]) == (1, 999, "1.0.0")
    assert reply.message.startswith(message)
    assert served.node.clean()
    served.node.refuse.clear()
    assert (await served.call("ADD")).code == 0


async def test_a_failing_roll_back_step_does_not_keep_the_others_from_running(served: Harness) -> None:
    served.node.refuse |= {"activate", "delete endpoint"}
    assert (await served.call("ADD")).code == 1
    assert served.node.clean()


async def test_the_address_is_released_only_after_the_link_is_deleted(served: Harness) -> None:
    served.node.refuse.add("activate")
    assert (await served.call("ADD")).code == 1
    assert served.node.steps[-3:] == ["delete endpoint", "reap", "release"]


async def test_an_address_stays_allocated_until_its_link_can_be_deleted(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.detach._FIRST_RETRY_SECONDS", 0.01)
    served.node.refuse |= {"configure", "reap"}
    assert (await served.call("ADD")).code == 1
    assert len(served.node.addresses) == 1
    assert [s.level for s in served.health.snapshot() if s.module == "cni.link-teardown"] == ["degraded"]
    served.node.refuse.clear()
    await eventually(served.node.clean)
    await wait_all_tasks_blocked()
    assert [s.level for s in served.health.snapshot() if s.module == "cni.link-teardown"] == ["ok"]


async def test_a_second_add_of_a_live_attachment_fails_and_harms_nothing(served: Harness) -> None:
    await served.call("ADD")
    before = dict(served.node.links), dict(served.node.book), set(served.node.addresses)
    reply = await served.call("ADD")
    assert reply.code == 1
    assert reply.message == (
        "unable to create endpoint: endpoint for CNI attachment ID cid1:eth0 already exists"
    )
    assert (served.node.links, served.node.book, served.node.addresses) == before


async def test_an_add_an_agent_died_over_replaces_what_it_left(served: Harness) -> None:
    await served.call("ADD")
    ((index, _),) = served.node.links.items()
    served.node.may_reap = anyio.Event()
    client = await served.begin("ADD", flags=1)
    await eventually(lambda: not served.node.book)
    assert index in served.node.links, "the new link must wait for its name"
    served.node.may_reap.set()
    assert (await client.reply()).code == 0
    assert index not in served.node.links
    assert len(served.node.links) == len(served.node.addresses) == len(served.node.book) == 1


async def test_an_add_an_agent_died_over_is_a_plain_one_when_it_left_nothing(served: Harness) -> None:
    await served.call("ADD", "cid2")
    assert (await served.call("ADD", "cid1", pod="pod1b", flags=1)).code == 0
    assert {each.container_id for each in served.node.all()} == {"cid1", "cid2"}


async def test_a_leftover_interface_in_the_pod_is_replaced(served: Harness) -> None:
    index = leftover(served.node, "someone-else", served.pod("pod1"))
    assert (await served.call("ADD")).code == 0
    assert index not in served.node.links
    assert len(served.node.links) == 1


async def test_an_interface_of_another_live_endpoint_in_the_same_pod_is_not_touched(served: Harness) -> None:
    await served.call("ADD", "cid1")
    reply = await served.call("ADD", "cid2")
    assert reply.message.endswith("endpoint for CNI attachment ID cid1:eth0 already exists")
    assert len(served.node.links) == len(served.node.addresses) == len(served.node.book) == 1


async def test_a_leftover_of_ours_on_the_node_is_replaced(served: Harness) -> None:
    index = leftover(served.node, "cid1", pod=0, alias="hive endpoint 7")
    assert (await served.call("ADD")).code == 0
    assert index not in served.node.links


async def test_a_link_of_someone_else_with_our_name_is_not_touched(served: Harness) -> None:
    index = leftover(served.node, "cid1", pod=0)
    reply = await served.call("ADD")
    assert reply.message == "unable to set up veth on host side: unable to create veth pair: file exists"
    assert list(served.node.links) == [index]
    assert not served.node.addresses


async def test_a_leftover_link_that_cannot_be_removed_fails_the_add(served: Harness) -> None:
    leftover(served.node, "someone-else", served.pod("pod1"))
    served.node.refuse.add("delete in pod")
    reply = await served.call("ADD")
    assert reply.message.startswith("unable to remove a leftover of interface eth0: ")
    assert not served.node.addresses


async def test_an_add_right_after_a_delete_waits_for_the_old_link(served: Harness) -> None:
    await served.call("ADD")
    served.node.may_reap = anyio.Event()
    assert (await served.call("DEL")).code == 0
    client = await served.begin("ADD")
    await eventually(lambda: served.node.steps.count("create_veth") == 2)
    assert not served.node.book
    served.node.may_reap.set()
    assert (await client.reply()).code == 0
    assert len(served.node.links) == len(served.node.addresses) == len(served.node.book) == 1


async def test_without_a_prepared_policy_map_the_add_waits_for_one(served: Harness) -> None:
    served.node.policy_maps, served.node.may_refill = 0, anyio.Event()
    client = await served.begin("ADD")
    await eventually(lambda: "wait for a policy map" in served.node.steps)
    assert served.node.clean()
    served.node.may_refill.set()
    assert (await client.reply()).code == 0
    assert len(served.node.links) == len(served.node.addresses) == len(served.node.book) == 1


async def test_calls_for_one_container_take_turns(served: Harness) -> None:
    served.node.policy_maps, served.node.may_refill = 0, anyio.Event()
    first, second = [await served.begin("ADD") for _ in range(2)]
    other = await served.begin("ADD", "cid2", pod="pod2")
    await eventually(lambda: served.node.steps.count("wait for a policy map") == 2)
    served.node.may_refill.set()
    assert (await first.reply()).code == 0
    assert "already exists" in (await second.reply()).message
    assert (await other.reply()).code == 0
    assert (await served.call("DEL")).code == 0
    assert [e.container_id for e in served.node.all()] == ["cid2"]


async def test_a_delete_ends_every_add_of_the_container_before_it(served: Harness) -> None:
    served.node.policy_maps, served.node.may_refill = 0, anyio.Event()  # never set
    adds = [await served.begin("ADD") for _ in range(2)]
    assert (await served.call("DEL")).code == 0
    assert [(await add.reply()).message for add in adds] == [DELETED, DELETED]
    assert served.node.clean()


async def test_a_request_of_a_disconnected_plugin_is_skipped(served: Harness) -> None:
    client = await served.begin("ADD", "cid1")
    client.close()
    assert (await served.call("DEL", "cid2")).code == 0  # accepted after the other
    assert "allocate" not in served.node.steps


async def test_a_plugin_that_goes_away_while_waiting_leaves_nothing(served: Harness) -> None:
    served.node.policy_maps, served.node.may_refill = 0, anyio.Event()
    client = await served.begin("ADD")
    await eventually(lambda: "wait for a policy map" in served.node.steps)
    client.close()
    served.node.may_refill.set()
    await wait_all_tasks_blocked()
    assert served.node.steps.count("allocate") == 1
    assert served.node.clean()


async def test_a_plugin_that_goes_away_before_the_answer_leaves_nothing(served: Harness) -> None:
    client = await served.begin("ADD")
    served.node.on_create = client.close
    await eventually(lambda: "activate" in served.node.steps and served.node.clean())


async def test_a_bug_in_a_step_is_rolled_back_and_reported_in_one_line(served: Harness) -> None:
    def trip() -> None:
        raise KeyError("bug")

    served.node.on_create = trip
    reply = await served.call("ADD")
    assert reply.message == "internal error in the agent: see its log"
    assert served.node.clean()


@pytest.mark.parametrize(
    ("conf", "code", "message"),
    [
        ({"chaining-mode": "none"}, 999, "invalid chaining-mode none"),
        (
            {"prevResult": {"cniVersion": "1.0.0", "interfaces": [], "ips": []}},
            999,
            "CNI PrevResult supplied, but not in chaining mode -- this is invalid, please set",
        ),
        (
            {"prevResult": {"cniVersion": "1.0.0", "ips": "x"}},
            999,
            'unable to parse CNI configuration "{\\"cni',
        ),
        (
            {"ipam": {"type": "host-local"}},
            7,
            "network configuration cilium: ipam.type=host-local, and",
        ),
        (
            {"fixedMac": "x"},
            999,
            BAD_MAC.format("x"),
        ),
        (
            {"prefixMacMap": {"a": "01:00:00:00:00:01"}},
            999,
            BAD_MAC.format("01:00:00:00:00:01"),
        ),
        (
            {"runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"cni.cilium.io/mac-address": "zz:zz"}}},
            999,
            BAD_MAC.format("zz:zz"),
        ),
        ({"ipam": 5}, 999, "unable to parse CNI configuration "),
        ({"cniVersion": "2.0.0"}, 1, "incompatible CNI versions"),
    ],
)
async def test_an_add_with_missing_arguments_is_refused_before_any_change(
    served: Harness, conf: dict[str, object], code: int, message: str
) -> None:
    reply = await served.call("ADD", conf=conf)
    assert (reply.code, reply.json["code"]) == (1, code)
    assert reply.message.startswith(message)
    assert served.node.steps == []


@pytest.mark.parametrize(
    "conf",
    [
        {"prevResult": None},
        {"macAddrMode": "random", "prefixMacMap": {}, "fixedMac": ""},
        {"macAddrMode": "unheard-of"},
        {"chaining-mode": "generic-veth"},  # without a previous result there is nothing to chain to
        {"runtimeConfig": {"portMappings": [], "io.kubernetes.cri.pod-annotations": None}},
        {"cniVersion": ""},
        *(
            {key: None}
            for key in (
                "cniVersion",
                "chaining-mode",
                "enable-route-mtu",
                "ipam",
                "macAddrMode",
                "fixedMac",
                "prefixMacMap",
                "runtimeConfig",
            )
        ),
        {"ipam": {"type": None}},
    ],
)
async def test_keys_without_effect_are_accepted(served: Harness, conf: dict[str, object]) -> None:
    assert (await served.call("ADD", conf=conf)).code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("K8S_POD_NAME=a;FOO=bar", 'unable to extract CNI arguments: ARGS: unknown args ["FOO=bar"]'),
        ("K8S_POD_NAME", 'unable to extract CNI arguments: ARGS: invalid pair "K8S_POD_NAME"'),
        ("K8S_POD_NAME=a;", 'unable to extract CNI arguments: ARGS: invalid pair ""'),
        *(
            (
                f"K8S_POD_NAME=a;IgnoreUnknown={value};A",
                (
                    "unable to extract CNI arguments: ARGS: error parsing value of pair"
                    f' "IgnoreUnknown={value}": boolean unmarshal error: invalid input {value.lower()}'
                ),
            )
            for value in ("Perhaps", "", "t")
        ),
        (
            "K8S_POD_INFRA_CONTAINER_ID=b",
            'unable to extract CNI arguments: ARGS: unknown args ["K8S_POD_INFRA_CONTAINER_ID=b"]',
        ),
    ],
)
async def test_arguments_are_read_as_the_library_reads_them(served: Harness, args: str, message: str) -> None:
    reply = await served.call("ADD", CNI_ARGS=args)
    assert reply.message == message
    assert served.node.steps == []


async def test_a_plugin_that_can_is_given_the_ports_to_reserve(served: Harness) -> None:
    served.reserved_ports = "51871,8472"
    reply = await served.call("ADD", flags=RESERVES_PORTS)
    assert (reply.code, reply.patch, reply.ports) == (0, PluginAction.PORTS, "51871,8472")
    assert reply.json["ips"]
    old = await served.call("ADD", "cid2", pod="pod2")  # of before an upgrade
    assert (old.code, old.patch, old.ports) == (0, 0, "")
    served.reserved_ports = ""
    assert (await served.call("ADD", "cid3", pod="pod3", flags=RESERVES_PORTS)).patch == 0


async def test_an_unknown_command_is_refused(served: Harness) -> None:
    assert (await served.call("FROB")).message == "unknown CNI_COMMAND: FROB"


async def test_an_add_without_a_namespace_is_refused(served: Harness) -> None:
    assert "without a network namespace" in (await served.call("ADD", pod=None)).message


async def test_a_pod_waiting_for_its_identity_comes_up_when_it_is_allocated(served: Harness) -> None:
    node = served.node
    node.may_identify = anyio.Event()
    call = await served.begin("ADD")
    await eventually(lambda: "identify" in node.steps)
    ((index, link),) = node.links.items()
    assert not link.up
    assert [endpoint.ifindex for endpoint in node.book.values()] == [index]
    node.may_identify.set()
    assert (await call.reply()).code == 0
    assert link.up
    assert node.steps[2:] == ["identify", "create endpoint", "activate", "configure", "sync carrier"]


async def test_an_identity_that_does_not_come_in_time_fails_the_add_and_leaves_nothing(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.attach.IDENTITY_SECONDS", 0.01)
    served.node.may_identify = anyio.Event()
    reply = await served.call("ADD")
    assert (reply.code, reply.json["code"]) == (1, 11)
    assert reply.message == "unable to create endpoint: no identity for its labels within 0.01 s"
    assert served.node.clean()


async def test_a_plugin_that_goes_while_an_identity_is_waited_for_leaves_nothing(served: Harness) -> None:
    node = served.node
    node.may_identify = anyio.Event()
    call = await served.begin("ADD")
    await eventually(lambda: "identify" in node.steps)
    call.close()
    node.may_identify.set()
    await eventually(node.clean)


async def test_a_delete_ends_an_add_that_waits_for_its_identity(served: Harness) -> None:
    node = served.node
    node.may_identify = anyio.Event()  # never set
    added = await served.begin("ADD")
    await eventually(lambda: "identify" in node.steps)
    assert (await served.call("DEL")).code == 0
    refused = await added.reply()
    assert (refused.code, refused.message) == (1, DELETED)
    await eventually(node.clean)


async def test_a_delete_ends_an_add_that_waits_for_an_address(served: Harness) -> None:
    node = served.node
    node.room, node.grown = 0, anyio.Event()  # never set
    added = await served.begin("ADD")
    await eventually(lambda: "allocate" in node.steps)
    assert (await served.call("DEL")).code == 0
    assert (await added.reply()).message == DELETED
    assert node.clean()


async def test_a_delete_that_comes_with_the_add_ends_it_too(served: Harness) -> None:
    served.node.may_identify = anyio.Event()  # never set
    codes: dict[str, int] = {}

    async def call(command: str) -> None:
        codes[command] = (await served.call(command)).code

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "ADD")
        tasks.start_soon(call, "DEL")
    assert codes == {"ADD": 1, "DEL": 0}
    await eventually(served.node.clean)


async def test_a_delete_of_another_container_leaves_a_waiting_add_alone(served: Harness) -> None:
    node = served.node
    node.may_identify = anyio.Event()
    added = await served.begin("ADD")
    await eventually(lambda: "identify" in node.steps)
    assert (await served.call("DEL", "cid2", pod="pod2")).code == 0
    node.may_identify.set()
    assert (await added.reply()).code == 0


async def test_the_pods_end_has_the_mac_address_that_the_pods_object_asks_for(served: Harness) -> None:
    served.node.annotated_mac = bytes.fromhex("0a0000000077")
    reply = await served.call("ADD")
    assert [one["mac"] for one in reply.json["interfaces"]][-1] == "0a:00:00:00:00:77"
    assert "set MAC address 0a:00:00:00:00:77" in served.node.steps


async def test_an_add_that_cannot_set_the_mac_address_leaves_nothing(served: Harness) -> None:
    served.node.annotated_mac = bytes.fromhex("0a0000000077")
    served.node.refuse = {"set MAC address 0a:00:00:00:00:77"}
    reply = await served.call("ADD")
    assert reply.message.startswith("unable to set MAC address on interface eth0: ")
    assert served.node.clean()
