"""The page of ``hive ui`` over an agent with flows that a test chooses."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from cells.hubble.codec import decode, encode, from_json
from cells.hubble.rpc.observer import GetFlowsRequest, GetFlowsResponse, ServerStatusResponse
from hive.ui.answers import NodeAnswers
from hive.ui.bridge import Bridge
from lifecycle.http import HttpServer
from tests.unit.hive.stub_agent import stub_agent

TOKEN = "token"


def flow(source: str, destination: str, *, denied: bool = False, at: float = 0.0, **more: Any) -> bytes:
    """Return a GetFlowsResponse: from one ``namespace/pod`` to another, `at` seconds ago."""
    ends = {}
    for name, text in (("source", source), ("destination", destination)):
        namespace, _, pod = text.partition("/")
        labels = [f"k8s:app={pod}", f"k8s:io.kubernetes.pod.namespace={namespace}"]
        ends[name] = {"identity": 300, "namespace": namespace, "pod_name": pod, "labels": labels}
    when = time.time() - at
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when)) + f".{int(when % 1 * 1e9):09d}Z"
    verdict = (
        {"verdict": "DROPPED", "drop_reason_desc": "POLICY_DENIED"} if denied else {"verdict": "FORWARDED"}
    )
    tree = {
        "time": moment,
        "uuid": f"{source} {destination} {when!r}",
        "IP": {"source": "10.0.1.1", "destination": "10.0.1.2", "ipVersion": "IPv4"},
        "l4": {"TCP": {"source_port": 40000, "destination_port": 80}},
        **ends,
        **verdict,
        **more,
    }
    return encode(from_json(GetFlowsResponse, {"flow": tree, "time": moment}))


class FakeHubble:
    """Replaces HubbleClient: has these flows, and supports only the calls below."""

    flows: Sequence[bytes] = ()
    seen = 0

    def __init__(self, server: str, timeout: float) -> None:
        del server, timeout

    def __enter__(self) -> FakeHubble:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream(self, method: str, request: bytes, timeout: float) -> Iterator[list[bytes]]:
        """Yield the flows since the requested time in one batch."""
        assert method == "observer.Observer/GetFlows"
        since = decode(GetFlowsRequest, request).since or 0
        yield [one for one in self.flows if (decode(GetFlowsResponse, one).time or 0) >= since]

    def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Return the ring buffer's status."""
        assert method == "observer.Observer/ServerStatus"
        return encode(ServerStatusResponse(seen_flows=self.seen or len(self.flows), max_flows=4095))


def _end(name: str, *, here: bool = True) -> dict[str, object]:
    return {
        "ask": f"pod/shop/{name}",
        "identity": 300,
        "namespace": "shop",
        "labels": [f"k8s:app={name}"],
        "pods": [f"shop/{name}"],
        "here": here,
    }


def _cell(source: int, destination: int, verdict: str) -> dict[str, object]:
    return {"from": source, "to": destination, "verdict": verdict, "headline": f"{verdict} by a rule"}


ANSWERS: dict[str, tuple[int, object]] = {
    "/hive/policy/matrix?": (
        200,
        {
            "sources": [_end("web"), _end("cart")],
            "destinations": [_end("web"), _end("cart")],
            "more-sources": 0,
            "more-destinations": 0,
            "namespaces": ["shop"],
            "cells": [_cell(0, 1, "allowed"), _cell(1, 0, "denied"), _cell(1, 1, "allowed")],
        },
    ),
    "/v1/cluster/nodes": (
        200,
        {
            "self": "default/one",
            "nodes-added": [
                {"name": f"default/{name}", "primary-address": {"ipv4": {"ip": f"192.0.2.{at}"}}}
                for at, name in enumerate(("two", "one"), 1)
            ],
        },
    ),
    "/v1/healthz": (200, {"cilium": {"state": "Ok", "msg": "fine"}}),
    "/v1/bgp/peers": (501, {"err": "off"}),
}


@contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, tuple[int, object]] = ANSWERS
) -> Iterator[str]:
    """Serve the page over a stub agent with FakeHubble's flows; return its address."""
    monkeypatch.setattr("hive.ui.flows.HubbleClient", FakeHubble)
    with stub_agent(folder, answers) as agent, start_blocking_portal() as portal:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(
            Bridge(TOKEN, NodeAnswers(agent.socket, "unix:///nowhere", 5.0)).handle, grace=0.1
        )
        portal.call(server.serve, listener)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/{TOKEN}/"
        finally:
            portal.call(server.close)
