"""Operations that the node's administrator has disabled."""

from pathlib import Path

import pytest

from cells.api.operations import DISABLED, denied, operation_name
from lifecycle import UsageError
from tests.unit.api.node import running_node


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/v1/healthz", "GetHealthz"),
        ("GET", "/v1/config", "GetConfig"),
        ("PUT", "/v1/endpoint/{id}", "PutEndpointID"),
        ("PATCH", "/v1/endpoint/{id}/config", "PatchEndpointIDConfig"),
        ("POST", "/v1/ipam", "PostIPAM"),
        ("DELETE", "/v1/ipam/{ip}", "DeleteIPAMIP"),
        ("GET", "/v1/cgroup-dump-metadata", "GetCgroupDumpMetadata"),
        ("GET", "/v1/map/{name}/events", "GetMapNameEvents"),
        ("GET", "/hive/graph", ""),
    ],
)
def test_operations_have_the_names_of_ciliums_server(method: str, path: str, name: str) -> None:
    assert operation_name(method, path) == name


NAMES = ["GetConfig", "GetHealthz", "PutEndpointID", ""]


@pytest.mark.parametrize(
    ("allowed", "off"),
    [
        (["*"], set()),
        ([], {"GetConfig", "GetHealthz", "PutEndpointID"}),
        (["Get*"], {"PutEndpointID"}),
        (["GetHealthz", "PutEndpointID"], {"GetConfig"}),
    ],
    ids=["all", "none", "some", "two"],
)
def test_api_operations_that_are_not_listed_are_disabled(allowed: list[str], off: set[str]) -> None:
    assert denied(allowed, NAMES) == off


@pytest.mark.parametrize("wanted", ["GetHealth", "get*", ""])
def test_an_unknown_operation_name_is_refused(wanted: str) -> None:
    with pytest.raises(UsageError, match="no such operation; expected"):
        denied([wanted], NAMES)


@pytest.mark.anyio
async def test_a_disabled_operation_is_refused_with_a_reason(tmp_path: Path) -> None:
    allowed = {"enable-cilium-api-server-access": "GetHealthz,GetConfig"}
    async with running_node(tmp_path, settings=allowed) as node:
        assert (await node.ask("GET", "/v1/healthz")).status == 200
        assert (await node.ask("GET", "/statedb/tables")).status == 200
        refused = await node.ask("GET", "/v1/endpoint")
        assert (refused.status, refused.raw.decode()) == (403, DISABLED)
        assert refused.headers["Content-Type"].startswith("text/plain")
