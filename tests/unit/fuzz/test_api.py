"""The API with arbitrary requests: documented responses, no crashed handler, no partial changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import quote_from_bytes

from anyio.from_thread import start_blocking_portal
from hypothesis import example, given
from hypothesis import strategies as st

from cells.api.wire import INTERNAL_ERROR
from cells.endpoint.kernel import config_row, lxc_value
from cells.endpoint.state.saved import encode
from tests.unit.api.node import UNLIMITED, Answer, Node, running_node
from tests.unit.fuzz.inputs import bounded, damaged, nested, odd_bytes

ENDPOINT = {
    "addressing": {"ipv4": "10.0.1.77", "ipv4-pool-name": "default", "ipv4-expiration-uuid": ""},
    "container-id": "cid1",
    "container-name": "",
    "container-interface-name": "eth0",
    "datapath-configuration": {"external-ipam": True},
    "host-mac": "02:00:00:00:00:01",
    "id": 7,
    "interface-index": 12,
    "interface-name": "lxc0123456789ab",
    "k8s-namespace": "default",
    "k8s-pod-name": "web-0",
    "labels": ["k8s:app=web"],
    "mac": "02:00:00:00:00:02",
    "netns-cookie": "4242",
    "state": "waiting-for-identity",
}
CONFIGURATION = {"options": {"SourceIPVerification": "Disabled"}, "policy-enforcement": "always"}

names = st.one_of(
    st.sampled_from(
        [
            b"1",
            b"cilium-local:0",
            b"container-id:cid1",
            b"cni-attachment-id:cid1:eth0",
            b"ipv4:10.0.1.77",
            b"ipv6:::1",
            b"10.0.1.77",
            b"fd00::1%eth0",
            b"ipv4:\xff",
            b"0x1_0",
            b"9" * 5000,
            "٣".encode(),
            b"-0",
            b"cep-name:a:b",
        ]
    ),
    st.binary(max_size=12),
)
paths = st.one_of(
    st.sampled_from(["/v1/config", "/v1/endpoint", "/v1/ipam", "/v1/healthz", "/statedb/tables", "/"]),
    names.map(lambda name: f"/v1/endpoint/{quote_from_bytes(name, safe='')}"),
    names.map(lambda name: f"/v1/ipam/{quote_from_bytes(name, safe='')}"),
    st.tuples(names, st.sampled_from(["healthz", "log", "labels", "config", "x"])).map(
        lambda pair: f"/v1/endpoint/{quote_from_bytes(pair[0], safe='')}/{pair[1]}"
    ),
    names.map(lambda name: f"/statedb/dump/{quote_from_bytes(name, safe='')}"),
)
queries = st.one_of(
    st.just(""),
    st.sampled_from(
        ["?owner=a&pool=default", "?family=ipv4", "?family=IPV6", "?family=%ff", "?pool=%00", "?&=&;"]
    ),
    st.binary(max_size=10).map(lambda raw: f"?owner={quote_from_bytes(raw)}&pool=default"),
)
bodies = st.one_of(
    st.just(b""),
    damaged(ENDPOINT),
    damaged(CONFIGURATION),
    damaged({"container-id": "cid1"}),
    st.lists(st.text(max_size=5), max_size=3).map(lambda texts: json.dumps(texts).encode()),
    odd_bytes,
)
methods = st.sampled_from(["GET", "PUT", "PATCH", "DELETE", "POST", "HEAD", "OPTIONS", "BREW"])
headers = st.sampled_from([{}, {"Expiration": "true"}, {"brief": "1"}, {"Content-Type": "text/plain"}])


async def listen_for_faults(faults: list[str]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(str(context)))


async def ask(node: Node, method: str, target: str, body: bytes, given_headers: dict[str, str]) -> Answer:
    async with asyncio.timeout(30):
        return await node.ask(method, target, body, headers=given_headers)


def test_every_request_is_answered_and_nothing_is_left_half_done(tmp_path: Path) -> None:
    faults: list[str] = []
    with start_blocking_portal("asyncio") as portal:
        manager = running_node(tmp_path, cidr6="fd00:1::/112", settings=UNLIMITED)
        with portal.wrap_async_context_manager(manager) as node:
            portal.call(listen_for_faults, faults)
            address = "10.0.1.77"
            assert (
                portal.call(ask, node, "POST", f"/v1/ipam/{address}?owner=x&pool=default", b"", {}).status
                == 200
            )

            @bounded(500)
            @example("PUT", "/v1/endpoint/x", "", json.dumps(ENDPOINT).encode(), {})
            @example("DELETE", "/v1/endpoint", "", b'{"container-id": "cid1"}', {})
            @example("PUT", "/v1/endpoint/x", "", nested(900), {})
            @example(
                "PUT", "/v1/endpoint/x", "", json.dumps(ENDPOINT | {"netns-cookie": "1" * 5000}).encode(), {}
            )
            @example(
                "PUT", "/v1/endpoint/x", "", json.dumps(ENDPOINT | {"interface-index": 2**40}).encode(), {}
            )
            @given(methods, paths, queries, bodies, headers)
            def is_answered(
                method: str, path: str, query: str, body: bytes, given_headers: dict[str, str]
            ) -> None:
                got = portal.call(ask, node, method, path + query, body, given_headers)
                assert not faults, faults
                assert INTERNAL_ERROR.encode() not in got.raw, (method, path, body)
                if got.status >= 400 and got.raw:
                    assert isinstance(got.body, (str, dict)), got.raw
                endpoints = node.endpoints.all()
                for endpoint in endpoints:
                    encode(endpoint)
                    config_row(endpoint, any_source=False)
                    lxc_value(endpoint).pack()
                rows = {number for kind, number in node.kernel.rows}
                assert rows == {endpoint.id for endpoint in endpoints}
                assert {int(each.name) for each in (tmp_path / "state").iterdir() if each.is_dir()} == rows

            is_answered()
            assert portal.call(ask, node, "GET", "/v1/endpoint", b"", {}).status == 200
            assert faults == []
