"""GET /hive/policy/explain and /hive/policy/reachability on an agent without policy rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.api.node import running_node

pytestmark = pytest.mark.anyio
QUERIES = {
    "source=host&destination=world": "neither end is an endpoint of this node",
    "source=host&destination=default/nobody": "there is no pod or service default/nobody that",
    "source=host&destination=77777": "there is no identity 77777",
    "source=host&destination=world&port=70000": "port '70000': expected a number up to 65535, or",
    "source=host&destination=world&port=80&protocol=any": "protocol 'ANY': expected one of",
}


async def test_an_invalid_query_is_refused_in_one_line(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        for query, error in QUERIES.items():
            answer = await node.ask("GET", f"/hive/policy/explain?{query}")
            assert answer.status == 400
            assert answer.body["err"].startswith(error)
        for query, status in {
            "endpoint=7&direction=ingress&identity=2&protocol=6&port=80": 200,
            "endpoint=7&direction=both&identity=2&protocol=6&port=80": 400,
            "endpoint=x&direction=ingress&identity=2&protocol=6&port=80": 400,
        }.items():
            assert (await node.ask("GET", f"/hive/policy/verdict?{query}")).status == status
        assert (await node.ask("GET", "/hive/policy/reachability?namespace=nowhere")).status == 400


async def test_the_matrix_includes_reserved_identities_and_refuses_unknown_namespaces(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        answer = await node.ask("GET", "/hive/policy/matrix")
        assert answer.status == 200
        assert [one["ask"] for one in answer.body["sources"]][:2] == ["host", "remote-node"]
        assert answer.body["cells"] == [], "no end is an endpoint of this node"
        for query, error in {
            "from=nowhere": "no pods of namespace nowhere are known",
            "most=0": "most 0: expected 1 to 60",
            "most=61": "most 61: expected 1 to 60",
        }.items():
            answer = await node.ask("GET", f"/hive/policy/matrix?{query}")
            assert (answer.status, answer.body["err"]) == (400, error)
