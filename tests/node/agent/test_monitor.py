"""The monitor socket of a real agent: pods' packets as they are sent."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.lab import agent_process, pods
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.manifests import pod, write
from tests.support.agents import environment, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NO_PINGS: dict[str, Any] = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "no-pings", "namespace": "default"},
    "spec": {
        "endpointSelector": {"matchLabels": {"app": "second"}},
        "ingressDeny": [{"fromEndpoints": [{"matchLabels": {"app": "first"}}]}],
    },
}


@contextmanager
def watching(lab: Lab, output: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``hive monitor`` in the node, connected; its output goes to a file."""
    command = [sys.executable, "-m", "hive", "monitor", *options]
    errors = output.with_suffix(".err")
    with (
        output.open("wb") as out,
        errors.open("wb") as err,
        lab.open() as node,
        node.popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment()) as process,
    ):
        try:
            eventually(lambda: "Listening" in errors.read_text())
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_denied_packet_is_seen_with_its_reason(node: Lab, tmp_path: Path, ending: signal.Signals) -> None:
    serving(node, "--enable-policy=always")
    first, second = pods.add(node, "first"), pods.add(node, "second")
    with watching(node, tmp_path / "seen", "-t", "drop", "--address", second.ipv4) as monitor:

        def seen() -> bool:
            with node.open_pod("first") as pod:
                assert pod.run(ping, second.ipv4, 1) == []
            text = (tmp_path / "seen").read_text()
            return "icmp type 8" in text and f"from default/first {first.ipv4}" in text

        eventually(seen)
        line = (tmp_path / "seen").read_text().splitlines()[0]
        assert re.match(r"[0-9:.]{12} drop, Policy denied: from default/first ", line), line
        assert f" to default/second {second.ipv4} " in line
        monitor.send_signal(ending)
        assert monitor.wait(60) == 0
    assert "0 lost" in (tmp_path / "seen.err").read_text()


def test_a_verdict_is_shown_with_the_rule_it_was_given_by(node: Lab, tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    write(manifests, "pods", *(pod(name, {"app": name}) for name in ("first", "second")))
    write(manifests, "policy", NO_PINGS)
    serving(node, f"--manifests-dir={manifests}")
    pods.add(node, "first")
    second = pods.add(node, "second")
    with watching(node, tmp_path / "seen", "-t", "policy-verdict"):

        def seen() -> bool:
            with node.open_pod("first") as calling:
                calling.run(ping, second.ipv4, 1)
            return (
                ", by spec.ingressDeny[0] of CiliumNetworkPolicy default/no-pings"
                in (tmp_path / "seen").read_text()
            )

        eventually(seen)


def test_changes_in_the_agent_are_seen_while_they_happen(node: Lab, tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    write(manifests, "pods", *(pod(name, {"app": name}) for name in ("first", "second")))
    serving(node, f"--manifests-dir={manifests}")
    earlier = pods.add(node, "first")

    def notified() -> list[tuple[str, dict[str, Any]]]:
        lines = (tmp_path / "seen").read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(one["subtype"], one["message"]) for one in events]

    def reported(subtype: str, **message: Any) -> bool:
        return any(kind == subtype and message.items() <= found.items() for kind, found in notified())

    with watching(node, tmp_path / "seen", "-t", "agent", "--json"):
        second = pods.add(node, "second")
        address = f"{second.ipv4}/32"
        eventually(lambda: reported("Endpoint created", **{"pod-name": "second", "namespace": "default"}))
        eventually(lambda: reported("IPCache entry upserted", cidr=address))
        eventually(lambda: reported("Endpoint regenerated"))
        write(manifests, "policy", NO_PINGS)
        eventually(lambda: reported("Policy updated", rule_count=1))
        (manifests / "policy.yaml").unlink()
        eventually(lambda: reported("Policy deleted", rule_count=1))
        pods.delete(node, "second")
        eventually(lambda: reported("Endpoint deleted", **{"pod-name": "second"}))
        eventually(lambda: reported("IPCache entry deleted", cidr=address))
        assert not reported("IPCache entry upserted", cidr=f"{earlier.ipv4}/32"), "it was there before"


@pytest.mark.parametrize("window", [("--last", "100"), ("--since", "1h")])
def test_packets_before_the_monitor_are_shown_with_names_first(
    node: Lab, tmp_path: Path, window: tuple[str, str]
) -> None:
    serving(node, "--enable-policy=always", "--enable-hubble=true")
    pods.add(node, "first")
    second = pods.add(node, "second")
    with watching(node, tmp_path / "live", "-t", "drop"), node.open_pod("first") as calling:

        def dropped() -> bool:
            assert calling.run(ping, second.ipv4, 1) == []
            return "icmp type 8" in (tmp_path / "live").read_text()

        eventually(dropped)
    with watching(node, tmp_path / "seen", "-t", "drop", *window, "--pod", "second"):
        eventually(lambda: "icmp type 8" in (tmp_path / "seen").read_text())
    line = next(one for one in (tmp_path / "seen").read_text().splitlines() if "icmp type 8" in one)
    assert "drop, Policy denied: from default/first " in line
    assert f" to default/second {second.ipv4} " in line


def test_notifications_can_be_switched_while_the_agent_runs(lab: Lab, tmp_path: Path) -> None:
    pods.add(lab, "first")
    second = pods.add(lab, "second")
    output = tmp_path / "seen"

    def set_option(option: str) -> None:
        command = [sys.executable, "-m", "hive", "config", "set", option]
        with lab.open() as node, node.popen(command, stdin=subprocess.DEVNULL, env=environment()) as process:
            assert process.wait(60) == 0

    def pings() -> None:
        with lab.open_pod("first") as pod:
            assert len(pod.run(ping, second.ipv4, 1)) == 1

    def pings_seen() -> None:
        traced = output.read_text().count("to-endpoint")
        pings()
        eventually(lambda: output.read_text().count("to-endpoint") > traced)

    with watching(lab, output, "-t", "trace", "-t", "policy-verdict", "--address", second.ipv4):
        pings()
        eventually(lambda: "verdict, " in output.read_text() and "to-endpoint" in output.read_text())
        set_option("PolicyVerdictNotification=Disabled")
        pings_seen()  # all earlier events have been written, too
        verdicts = output.read_text().count("verdict, ")
        pings_seen()
        assert output.read_text().count("verdict, ") == verdicts


def test_the_monitor_ends_with_the_agent(lab: Lab, tmp_path: Path) -> None:
    with watching(lab, tmp_path / "seen") as monitor:
        assert agent_process.terminate(lab)
        assert monitor.wait(60) == 1
    assert "the agent has closed the connection" in (tmp_path / "seen.err").read_text()
