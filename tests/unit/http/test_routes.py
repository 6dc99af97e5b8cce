"""HTTP routing by method and path."""

import pytest

from lifecycle.http import Routes


@pytest.fixture
def routes() -> Routes[str]:
    found: Routes[str] = Routes()
    found.add("GET", "/v1/endpoint", "list")
    found.add("GET", "/v1/endpoint/{id}", "one")
    found.add("PUT", "/v1/endpoint/{id}", "put")
    found.add("GET", "/v1/endpoint/{id}/log", "log")
    return found


@pytest.mark.parametrize(
    ("method", "path", "found", "info"),
    [
        ("GET", "/v1/endpoint", "list", {}),
        ("GET", "/v1/endpoint/7", "one", {"id": "7"}),
        ("PUT", "/v1/endpoint/cilium-local:0", "put", {"id": "cilium-local:0"}),
        ("GET", "/v1/endpoint/a%2Fb", "one", {"id": "a/b"}),
        ("GET", "/v1/end%70oint/7/log", "log", {"id": "7"}),
    ],
)
def test_a_path_leads_to_its_handler(
    routes: Routes[str], method: str, path: str, found: str, info: dict[str, str]
) -> None:
    match = routes.match(method, path)
    assert (match.handler, match.info) == (found, info)


def test_a_path_without_named_parts_has_only_its_own_methods() -> None:
    routes: Routes[str] = Routes()
    routes.add("GET", "/v1/recorder/masks", "masks")
    routes.add("PUT", "/v1/recorder/{id}", "put")
    match = routes.match("PUT", "/v1/recorder/masks")
    assert (match.handler, match.allowed) == (None, frozenset({"GET"}))
    assert routes.match("PUT", "/v1/recorder/7").handler == "put"


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/endpoint/", "/v1/endpoint/7/", "/v1%2Fendpoint", "*"])
def test_unknown_paths_have_no_handler(routes: Routes[str], path: str) -> None:
    match = routes.match("GET", path)
    assert (match.handler, match.allowed) == (None, frozenset())


def test_a_method_that_is_not_there_leads_nowhere_but_others_do(routes: Routes[str]) -> None:
    match = routes.match("DELETE", "/v1/endpoint/7")
    assert (match.handler, match.allowed) == (None, frozenset({"GET", "PUT"}))
