"""The list of endpoints is encoded once, and shows every change."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.endpoint.model import Code, State, Subject
from tests.unit.api.node import running_node
from tests.unit.api.pods import added

pytestmark = pytest.mark.anyio


async def test_the_list_shows_what_each_endpoint_shows_whatever_was_asked_before(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:

        async def listed() -> list[tuple[int, str, dict[str, object]]]:
            found = (await node.ask("GET", "/v1/endpoint")).body
            assert found == [(await node.ask("GET", f"/v1/endpoint/{one['id']}")).body for one in found]
            return [(one["id"], one["status"]["state"], one["status"]["policy"]["realized"]) for one in found]

        first, _ = await added(node, "cid1")
        before = await listed()
        assert await listed() == before
        second, _ = await added(node, "cid2")
        assert [one[0] for one in await listed()] == [first, second]
        node.endpoints.status(first).add(Code.FAILURE, Subject.BPF, "gone wrong", State.READY)
        assert [one[1] for one in await listed()] == ["not-ready", "ready"]
        await node.ask("PATCH", "/v1/config", {"policy-enforcement": "always"})
        assert [one[2]["policy-enabled"] for one in await listed()] == ["both", "both"]
        await node.ask("DELETE", "/v1/endpoint", {"container-id": "cid1"})
        assert [one[0] for one in await listed()] == [second]
