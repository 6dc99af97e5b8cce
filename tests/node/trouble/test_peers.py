"""Authorization to change pods: root only, whatever group owns the sockets; that group may read."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from tests.support.account import agreed
from tests.support.cni_plugin import HEADER
from tests.unit.cni_server.harness import request

pytestmark = pytest.mark.node

RUN = Path("/run/cilium")
UNPRIVILEGED, GROUP = 65534, 4242


def opened() -> None:
    """Open both sockets to a group, as an administrator may."""
    for name in ("cilium.sock", "cni.sock"):
        os.chown(RUN / name, 0, GROUP)
        (RUN / name).chmod(0o660)


def as_member(do: Callable[..., Any], *args: object) -> Any:
    """Do it as an unprivileged user, in the sockets' group."""
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(UNPRIVILEGED)
    return do(*args)


def ask(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of an answer of the API."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(RUN / "cilium.sock"))
        client.sendall(head.encode() + body)
        got = b"".join(iter(lambda: client.recv(1 << 16), b""))
    answer, _, content = got.partition(b"\r\n\r\n")
    return int(answer.split()[1]), content


def call(command: str) -> tuple[int, bytes]:
    """Exit code and text of an answer on cni.sock."""
    variables = {"CNI_COMMAND": command, "CNI_CONTAINERID": "cid", "CNI_IFNAME": "eth0"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(30)
        client.connect(str(RUN / "cni.sock"))
        client.send(request(variables, b'{"cniVersion":"1.1.0","name":"cilium"}'))
        packet = client.recv(1 << 18)
    return HEADER.unpack_from(packet)[3], packet[HEADER.size :]


def test_a_group_may_look_and_only_root_may_change(lab: Lab) -> None:
    pod = pods.add(lab, "pod")
    number = next(iter(agreed(lab).listed))
    before = agreed(lab)
    with lab.open() as inside:
        inside.run(opened)
        for path in ("/v1/config", "/v1/endpoint", f"/v1/endpoint/{number}", "/v1/healthz"):
            assert inside.run(as_member, ask, "GET", path)[0] == 200
        for method, path, body in (
            ("PUT", "/v1/endpoint/cilium-local:0", b'{"state":"ready"}'),
            ("DELETE", f"/v1/endpoint/{number}", b""),
            ("DELETE", "/v1/endpoint", b'{"container-id":"cid"}'),
            ("PATCH", "/v1/config", b'{"policy-enforcement":"always"}'),
            ("POST", "/v1/ipam", b""),
            ("POST", f"/v1/ipam/{pod.ipv4}", b""),
            ("DELETE", f"/v1/ipam/{pod.ipv4}", b""),
        ):
            message = (
                f"{method} changes the node: it needs uid 0, the caller has uid {UNPRIVILEGED}\n".encode()
            )
            assert inside.run(as_member, ask, method, path, body) == (403, message)
        for command in ("ADD", "DEL", "GC", "STATUS"):
            code, text = inside.run(as_member, call, command)
            refusal = f"cni.sock requires uid 0, the caller has uid {UNPRIVILEGED}"
            assert (code, json.loads(text)["msg"]) == (1, refusal)
    assert agreed(lab) == before
    pods.delete(lab, "pod")
    assert agreed(lab).listed == {}
