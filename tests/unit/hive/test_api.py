"""``hive api``: the operations of the REST API, listed and as a document."""

import json

import pytest

from tests.support.command_line import hive


def test_operations_are_listed_by_the_names_that_switch_them_off(capsys: pytest.CaptureFixture[str]) -> None:
    lines = hive(capsys, "api").out.splitlines()
    found = next(line for line in lines if line.startswith("PutEndpointID "))
    assert found.split()[:3] == ["PutEndpointID", "PUT", "/v1/endpoint/{id}"]


def test_a_part_of_the_document_is_found_by_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "api", "-o", "jsonpath={.components.schemas.EndpointChangeRequest.required}")
    assert json.loads(result.out) == ["state"]
