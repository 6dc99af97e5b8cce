"""DNS query verdicts are cached, and updated with rules, endpoints and addresses."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import pytest

from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.endpoint import Endpoint, endpoint_table
from cells.policy.control import NameFilter
from cells.policy.maps import KnownRules
from cells.proxy.dns.exchange import UDP, ClientQuery, QueryPolicy, QueryVerdict
from lifecycle import invoke
from lifecycle.testing import eventually
from tests.unit.ciliumendpoint.endpoints import endpoint
from tests.unit.policy.room import PORT, room

pytestmark = pytest.mark.anyio

SERVER = ip_address("192.0.2.53")
RULES = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: names, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: cart}}
  egress:
    - toEntities: [world]
      toPorts: [{ports: [{port: "53", protocol: UDP}], rules: {dns: [{matchName: a.example}]}}]
"""


class Asked:
    """What a store of names is to remember of servers."""

    def __init__(self) -> None:
        self.noted: list[NameFilter] = []

    def set_server_filter(self, _endpoint: Endpoint, _server: object, may: NameFilter) -> None:
        self.noted.append(may)

    def rules_changed(self, _endpoint_id: int) -> None:
        self.noted.clear()

    def restored_filter(self, _endpoint_id: int, _server: object) -> None:
        return None


async def test_remembered_verdicts_follow_rules_addresses_and_endpoints(tmp_path: Path) -> None:
    async with room(tmp_path, None, invoke(KnownRules), proxy=PORT) as node:
        pod = endpoint(node.cart)
        endpoints = endpoint_table()
        endpoints.put(pod)
        ipcache, store = node.hive.get(Ipcache), Asked()
        policy = QueryPolicy(endpoints, ipcache, node.policy, cast("Any", store), node.hive.get(KnownRules))
        request = ClientQuery(b"", (cast("Any", pod.ipv4), 40000), (SERVER, 53), UDP)

        def verdict(name: str) -> QueryVerdict | None:
            flow = policy.flow(request)
            return None if flow is None else flow.verdict(name)

        node.write(RULES)
        await eventually(lambda: verdict("b.example.") is QueryVerdict.REFUSE)
        assert verdict("a.example.") is QueryVerdict.FORWARD
        assert len(store.noted) == 1, "a server is noted once, not with each query"
        node.write(RULES.replace("a.example", "b.example"))
        await eventually(lambda: verdict("b.example.") is QueryVerdict.FORWARD)
        assert verdict("a.example.") is QueryVerdict.REFUSE

        def claim(identity: int) -> IpcacheEntry:
            return IpcacheEntry(
                prefix=f"{SERVER}/32", identity=identity, source=Source.KVSTORE, resource="test"
            )

        ipcache.upsert(claim(1))
        assert verdict("b.example.") is QueryVerdict.REFUSE, "the server is the node now, not the world"
        ipcache.withdraw("test", [f"{SERVER}/32"])
        assert verdict("b.example.") is QueryVerdict.FORWARD
        endpoints.delete(pod.id)
        assert verdict("b.example.") is None
