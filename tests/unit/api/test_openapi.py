"""The OpenAPI document: every operation of the server, readable by other tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import schemathesis

from cells.api.openapi import DESCRIBED, document
from cells.api.operations import operation_name
from tests.unit.api.node import running_node

ROOT = Path(__file__).parents[3]


@pytest.mark.anyio
async def test_every_operation_of_the_server_is_described_and_nothing_else(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        served = Counter((route.method, route.path) for route in node.api._routes())
    assert served == Counter((one.method, one.path) for one in DESCRIBED)


def test_operations_have_the_names_that_switch_them_off() -> None:
    for one in DESCRIBED:
        assert one.id == (operation_name(one.method, one.path) or one.id)
    names = Counter(one.id for one in DESCRIBED if not one.alias)
    assert max(names.values()) == 1
    assert names >= Counter(["PutEndpointID", "PostIPAM", "GetHealthz", "GetStatedbDumpTable"])


def test_every_part_of_a_path_is_described() -> None:
    for one in DESCRIBED:
        parts = {part.strip("{}") for part in one.path.split("/") if part.startswith("{")}
        assert {each.name for each in one.parameters if each.place == "path"} == parts, one.path


def test_the_document_is_openapi_3_1() -> None:
    schemathesis.openapi.from_dict(document()).validate()


def test_answers_leave_out_what_defaults_would_only_repeat() -> None:
    schema = document()["components"]["schemas"]["Identity"]
    assert schema["properties"]["labels"] == {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize("module", ["cells.agent", "hive.main"])
def test_what_describes_and_checks_the_api_is_not_loaded_with_it(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cmd'}"},
    )
    unwanted = {"cells.api.openapi", "schemathesis", "werkzeug", "rich", "requests", "hypothesis", "aiohttp"}
    assert not unwanted & set(done.stdout.split())
