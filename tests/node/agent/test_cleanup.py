"""``hive cleanup`` while pods send: denied traffic stays blocked, and the node remains connected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hive.lab import pods
from hive.lab.namespaces import inside
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.flows import udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import ping
from tests.node.agent.manifests import POLICY, _enforcement, pod, write
from tests.support.agents import environment, serving, terminated
from tests.support.traffic import packets
from tests.support.waiting import eventually

pytestmark = pytest.mark.node
ONLY_EACH_OTHER = {
    **POLICY,
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "client"}},
        "egress": [{"toEndpoints": [{"matchLabels": {"app": "server"}}]}],
    },
}


def cleanup(node: Lab) -> None:
    command = [sys.executable, "-m", "hive", "cleanup", "--force"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with node.open() as place, place.popen(command, env=environment(), **streams) as run:
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err.decode()
    assert b"Error" not in err, err.decode()
    assert b"removed lxc" in out, out.decode()


@pytest.mark.parametrize("settings", [(), ("--enable-endpoint-routes=true",)])
def test_what_policy_denies_stays_inside_while_everything_is_removed(
    node: Lab, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    write(tmp_path, "client", pod("client", {"app": "client"}))
    write(tmp_path, "server", pod("server", {"app": "server"}))
    write(tmp_path, "policy", ONLY_EACH_OTHER)
    pid = serving(node, f"--manifests-dir={tmp_path}", *settings)
    pods.add(node, "client")
    for number in range(8):
        pods.add(node, f"other-{number}")
    eventually(lambda: _enforcement(pid, "client") == "egress")
    with (
        node.open_pod("client") as calling,
        node.open_outside() as outside,
        node.open() as own,
    ):
        with inside(outside):
            sock = udp_socket()
        with sock:
            receiving = outside.start(udp_receiver, sock)
            sending = calling.start(udp_sender, (OUTSIDE_ADDRESS, sock.getsockname()[1]), 2000.0)
            try:
                assert terminated(node, pid) == 0
                before = own.run(packets)
                eventually(lambda: own.run(packets) > before + 200)
                cleanup(node)
                assert own.run(ping, OUTSIDE_ADDRESS, 3), "the node reaches the network as before"
                received = receiving.finish(within=60)
            finally:
                sending.kill()
                receiving.kill()
    assert received.packets == 0
