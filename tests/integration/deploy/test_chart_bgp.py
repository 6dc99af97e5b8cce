"""BGP in the chart: settings, RBAC rules and the speaker's own pod."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import structlog

from cells.bgp import SpeakerSettings
from cells.bgp.isolation import configuration_of, wanted_speakers
from cells.bgp.speaker_processes import Speakers
from cells.bgp.speaker_state import BGPInstance, BGPPeer, IsolatedPeer, SpeakerName
from cells.bgp.speaker_target import SpeakerTarget
from lifecycle import BatchError
from lifecycle.testing import eventually
from tests.support import chart
from tests.support.bgp import gobgpd_pids
from tests.support.recordings import recorded as recording

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

CONFIG = "ConfigMap/cilium-config"
SPEAKER = "DaemonSet/cilium-bgp-speaker"
OPERATORS = {f"{kind}/cilium-operator-bgp-control-plane-secrets" for kind in ("Role", "RoleBinding")}
"""Cilium's operator may read every Secret, by its ClusterRole."""


def rendered(**given: Any) -> dict[str, Any]:
    return chart.objects({"bgpControlPlane": {"enabled": True, **given}})


def test_objects_and_keys_are_those_of_cilium_s_chart() -> None:
    recorded = json.loads(recording("helm/feature-bgp-own-secrets-namespace").read_text())
    objects = chart.objects(recorded["values"])
    theirs = {key for key in recorded["diff"] if key != CONFIG}
    assert {one for one in objects if "bgp" in one} == theirs | {SPEAKER}
    keys = {key for key in objects[CONFIG]["data"] if "bgp" in key}
    assert keys - {"external-bgp-speaker"} == {
        pointer.removeprefix("/data/") for pointer in recorded["diff"][CONFIG]
    }
    (subject,) = objects["RoleBinding/cilium-bgp-control-plane-secrets"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("cilium", "kube-system")


def test_the_operator_may_see_which_secrets_there_are_where_it_reports_them() -> None:
    objects = rendered()
    assert objects.keys() >= OPERATORS
    assert objects["Role/cilium-operator-bgp-control-plane-secrets"]["metadata"]["namespace"] == "kube-system"


def test_without_bgp_no_bgp_object_is_rendered() -> None:
    objects = chart.objects({})
    assert [one for one in objects if "bgp" in one] == []
    assert [key for key in objects[CONFIG]["data"] if "bgp" in key] == []
    rules = [each for one in objects.values() for each in one.get("rules") or ()]
    assert "bgp" not in str(rules)


def test_the_speaker_is_called_where_the_agent_looks_and_may_do_nothing_else() -> None:
    objects = rendered()
    pod = objects[SPEAKER]["spec"]["template"]["spec"]
    container, further = pod["containers"]
    agent = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]
    run = next(one["hostPath"]["path"] for one in agent["volumes"] if one["name"] == "cilium-run")
    assert [one["hostPath"]["path"] for one in pod["volumes"]] == [f"{run}/bgp"]
    assert container["volumeMounts"] == [{"name": "bgp-run", "mountPath": "/var/run/cilium/bgp"}]
    assert "unix:///var/run/cilium/bgp/speaker.sock" in container["args"][0]
    assert ">>speaker.log" in container["args"][0], "where the agent reads why sessions ended"
    assert further["volumeMounts"] == container["volumeMounts"]
    for one in (container, further):
        assert one["image"] == f"{agent['containers'][0]['image']}-bgp"
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}
    assert pod["hostNetwork"]
    assert not pod["automountServiceAccountToken"], "it asks the API server for nothing"
    assert objects[CONFIG]["data"]["external-bgp-speaker"] == "true"


@pytest.mark.anyio
async def test_the_pod_of_speakers_runs_a_gobgpd_for_a_peer_when_the_agent_asks() -> None:
    """And another one when that has ended; all end with the pod."""
    (_, container) = rendered()[SPEAKER]["spec"]["template"]["spec"]["containers"]
    peer = BGPPeer("edge", "tor", IPv4Address("192.0.2.1"), 65000, 65001)
    alone = IsolatedPeer("edge", peer.address, configuration_of(peer), datetime.now(UTC))
    instance, name = BGPInstance("edge", 65001, IPv4Address("192.0.2.9")), SpeakerName("edge", "192.0.2.1")
    row = wanted_speakers([instance], [peer], (), (), (), [alone])[name]
    with TemporaryDirectory() as short:
        folder = Path(short) / "bgp"
        folder.mkdir()
        speakers = Speakers(SpeakerSettings(external_bgp_speaker=True), Path(short), structlog.get_logger())
        assert speakers.most_own == 0, "a pod of the earlier chart cannot start one"
        target = SpeakerTarget(speakers)
        with pytest.raises(BatchError) as caught:
            await target.put({name: row})
        assert "see the container isolated-peers of the pod" in str(caught.value.failures[name])
        with running(container, folder) as pod:
            await eventually(lambda: is_read(folder / "launch"))
            assert speakers.most_own == 8
            await target.put({name: row})
            assert (await target.observe())[name].peers == row.facts.peers
            (first,) = gobgpd_pids(folder)
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: gobgpd_pids(folder) == [])
            await target.observe()
            await target.put({name: row})
            assert gobgpd_pids(folder) != [first]
            await target.drop([name])
            await eventually(lambda: gobgpd_pids(folder) == [])
            await target.put({name: row})
            pod.terminate()
            await eventually(lambda: pod.poll() is not None and gobgpd_pids(folder) == [])


def is_read(fifo: Path) -> bool:
    """Raises OSError."""
    os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    return True


@contextmanager
def running(container: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What a container runs, with a folder in place of its volume."""
    script = container["args"][0].replace("/var/run/cilium/bgp", str(folder))
    process = subprocess.Popen([*container["command"], script], start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_without_a_speaker_pod_the_agent_starts_gobgpd() -> None:
    objects = rendered(speaker={"enabled": False})
    assert SPEAKER not in objects
    assert objects[CONFIG]["data"]["external-bgp-speaker"] == "false"
