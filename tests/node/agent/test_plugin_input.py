"""Invalid requests of a runtime: plugin and agent return one error, and create nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from tests.support.account import agreed
from tests.support.agents import invoke, made, serving
from tests.support.namespaces import need_root

pytestmark = pytest.mark.node

CONF = {"cniVersion": "1.0.0", "name": "cilium", "type": "cilium-cni"}
POD = "pod"
ARGS = "unable to extract CNI arguments: ARGS:"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One for all, with a pod's namespace that is never attached: every request is refused."""
    need_root()
    with made(Lab(f"input-{os.getpid()}")) as lab:
        serving(lab)
        lab.hold_pod(POD)
        yield lab


WRONG: tuple[tuple[dict[str, str | None], object, int, str], ...] = (
    ({}, b"{", 6, "error unmarshall network config: unexpected end of JSON input"),
    ({}, {"cniVersion": "1.0.0"}, 7, "missing network name"),
    ({}, CONF | {"cniVersion": "2.0.0"}, 1, "incompatible CNI versions"),
    ({}, CONF | {"agent-socket": "cni.sock"}, 7, "agent-socket is not usable: expected an absolute path"),
    ({"CNI_CONTAINERID": "a/b"}, CONF, 4, "invalid characters in containerID"),
    ({"CNI_IFNAME": "a-name-far-too-long"}, CONF, 4, "interface name is too long"),
    ({"CNI_IFNAME": None, "CNI_NETNS": None}, CONF, 4, "required env variables [CNI_NETNS,CNI_IFNAME]"),
    ({"CNI_COMMAND": "FROB"}, CONF, 4, "unknown CNI_COMMAND: FROB"),
    ({"CNI_NETNS": "/run/netns/none"}, CONF, 999, "opening netns pinned at /run/netns/none: "),
    ({"CNI_NETNS": "/proc/version"}, CONF, 999, "opening netns pinned at /proc/version: "),
    ({"CNI_NETNS": "/proc/self/ns/net"}, CONF, 8, "plugin's netns and netns from CNI_NETNS"),
    ({"CNI_ARGS": "K8S_POD_NAME"}, CONF, 999, f'{ARGS} invalid pair "K8S_POD_NAME"'),
    ({"CNI_ARGS": "COLOUR=red"}, CONF, 999, f'{ARGS} unknown args ["COLOUR=red"]'),
    ({}, CONF | {"chaining-mode": "aws-cni", "prevResult": {"ips": []}}, 999, "no link found"),
    ({}, CONF | {"chaining-mode": "nonsense"}, 999, "invalid chaining-mode nonsense"),
    ({}, CONF | {"ipam": {"type": "host-local"}}, 7, "network configuration cilium: ipam.type=host"),
    ({}, CONF | {"name": 7}, 6, "error unmarshall network config: "),
    ({}, CONF | {"prevResult": {"ips": []}}, 999, "CNI PrevResult supplied, but not in chaining mode"),
    ({"CNI_COMMAND": "CHECK"}, CONF, 7, "InvalidNetworkConfig"),
    ({}, CONF | {"fixedMac": "01:00:00:00:00:01"}, 999, "unable to set MAC address on interface eth0: "),
    ({"CNI_COMMAND": "GC"}, CONF | {"cniVersion": "1.1.0"}, 7, "network configuration cilium: cni.dev"),
)  # fmt: skip
"""Environment, standard input, and the code and the beginning of the message of the error."""


def test_a_wrong_request_is_one_error_and_makes_nothing(lab: Lab) -> None:
    for env, stdin, code, message in WRONG:
        refusal = invoke(lab, POD, "ADD", stdin, **env)
        assert refusal.code == 1, message
        assert (refusal.json["code"], refusal.json["msg"][: len(message)]) == (code, message)
        assert "\n" not in refusal.json["msg"], message
        assert refusal.stderr == "", message
    assert agreed(lab).listed == {}
    with lab.open_pod(POD) as pod:
        assert pod.run(os.listdir, "/proc/sys/net/ipv4/conf") == ["all", "default", "lo"]


def test_an_add_of_an_existing_attachment_is_refused_and_the_pod_stays(lab: Lab) -> None:
    assert invoke(lab, POD, "ADD").code == 0
    before = agreed(lab)
    assert len(before.listed) == 1
    exists = "unable to create endpoint: endpoint for CNI attachment ID "
    for changes in ({}, {"CNI_CONTAINERID": "another-container"}):
        refusal = invoke(lab, POD, "ADD", **changes)
        assert (refusal.code, refusal.json["code"]) == (1, 999)
        assert refusal.json["msg"] == f"{exists}{pods.container_id(lab, POD)}:eth0 already exists"
        assert agreed(lab) == before
    for _ in range(2):
        assert invoke(lab, POD, "DEL").code == 0
        assert agreed(lab).listed == {}


def test_a_delete_of_an_unknown_attachment_succeeds(lab: Lab) -> None:
    for changes in ({}, {"CNI_NETNS": ""}, {"CNI_NETNS": "/run/netns/none"}, {"CNI_NETNS": None}):
        ended = invoke(lab, POD, "DEL", CNI_CONTAINERID="never-was", **changes)
        assert (ended.code, ended.stdout) == (0, "")
