"""The OpenAPI document of the API, generated from the described operations.

``hive api`` prints it, and tests derive valid and invalid requests from it; the running agent does not import
it.

Source: OpenAPI 3.1.1 (spec.openapis.org/oas/v3.1.1); types by msgspec as JSON Schema 2020-12.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec

from cells.api.openapi import endpoints, hive, node
from cells.api.openapi.described import Described, DescribedResponse, Parameter
from cells.api.wire import JSON

__all__ = ["DESCRIBED", "Described", "document"]


DESCRIBED: tuple[Described, ...] = (
    *endpoints.OPERATIONS,
    *node.OPERATIONS,
    *node.POLICY_OPERATIONS,
    *node.SERVICE_OPERATIONS,
    *node.NOT_BUILT_OPERATIONS,
    *node.BGP_OPERATIONS,
    *hive.OPERATIONS,
)
"""Every operation of the server."""

OPENAPI = "3.1.1"
REF = "#/components/schemas/{name}"
ABOUT = """\
The API that the agent serves on its unix socket, by default `/var/run/cilium/cilium.sock`:

    curl --unix-socket /var/run/cilium/cilium.sock http://localhost/v1/healthz

Below `/v1` are Cilium 1.17's operations with its statuses, bodies and names, so that `cilium-cni` and
`cilium-dbg` work with this agent. Subsystems that are not built have no objects and refuse changes.
`/statedb` and `/hive` show the agent itself. Requests that change anything need uid 0.

Keys with a zero value (an empty text, 0, false) are omitted from answers. In requests, null is the same as
an absent key, and unknown keys are ignored. A boolean in a header or query is true for
`true`, `1`, `yes`, `on` and the like, false for every other text. Unknown paths are answered 404,
unknown methods of a path 405, both with a `Problem`. One status may have answers with and without a body.

Generated from the code by `hive api -o json`; a test keeps it up to date."""
_ZERO: tuple[object, ...] = ("", 0, False, [], {})


def document() -> dict[str, Any]:
    """Return the document as JSON builtins; operations in order of description."""
    types = list(_types())
    schemas, components = _components(types)
    named = _Schemas(types, list(schemas))
    paths: dict[str, dict[str, Any]] = {}
    for one in DESCRIBED:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, named)
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "The agent's API",
            "description": ABOUT,
            "version": "1.17",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [
            {"url": "http://localhost", "description": "on the unix socket; the host name is ignored"}
        ],
        "paths": paths,
        "components": {"schemas": {name: _without_zeros(components[name]) for name in sorted(components)}},
    }


def _components(types: list[Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the schemas of types and nested structs by Cilium's names, e.g. Endpoint for EndpointModel."""
    schemas, components = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=REF)
    named = {_upstream_name(name): _by_upstream_names(schema) for name, schema in components.items()}
    return [_by_upstream_names(schema) for schema in schemas], named


def _upstream_name(name: str) -> str:
    return name.removesuffix("Model")


def _by_upstream_names(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_by_upstream_names(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _upstream_name(value) if key in {"$ref", "title"} else _by_upstream_names(value)
        for key, value in schema.items()
    }


class _Schemas:
    """Caches the schema of each type in use."""

    def __init__(self, types: list[Any], schemas: list[dict[str, Any]]) -> None:
        self._known = list(zip(types, schemas, strict=True))

    def __getitem__(self, kind: Any) -> dict[str, Any]:
        return next(dict(schema) for known, schema in self._known if known is kind)


def _types() -> Iterable[Any]:
    for one in DESCRIBED:
        yield from (each.kind for each in one.parameters)
        if one.body is not None:
            yield one.body.kind
        yield from (each.kind for each in one.all_answers() if each.kind is not None)


def _anything(kind: type) -> dict[str, Any]:
    """Return the schema of ``object``: any value.

    Raises NotImplementedError for all types that msgspec and this function do not support.
    """
    if kind is object:
        return {"description": "Anything."}
    raise NotImplementedError


def _without_zeros(schema: Any) -> Any:
    """Remove defaults that only mean that a key may be absent."""
    if isinstance(schema, list):
        return [_without_zeros(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_zeros(value)
        for key, value in schema.items()
        if key != "default" or not (value is None or value in _ZERO)
    }


def _operation(one: Described, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {} if one.alias else {"operationId": one.id}
    described |= {"tags": [one.tag], "summary": one.summary}
    if one.parameters:
        described["parameters"] = [_parameter(each, schemas) for each in one.parameters]
    if one.body is not None:
        content: dict[str, Any] = {"schema": schemas[one.body.kind]}
        if one.body.example is not None:
            content["example"] = one.body.example
        described["requestBody"] = {
            "description": one.body.text,
            "required": one.body.required,
            "content": {JSON: content},
        }
    by_status = groupby(one.all_answers(), key=lambda answer: answer.status)
    described["responses"] = {str(status): _response(list(group), schemas) for status, group in by_status}
    return described


def _parameter(one: Parameter, schemas: _Schemas) -> dict[str, Any]:
    schema = schemas[one.kind]
    if one.required and one.kind is str:
        schema = {**schema, "minLength": 1}  # an empty text counts as absent
    described = {
        "name": one.name,
        "in": one.place,
        "description": one.text,
        "required": one.required,
        "schema": schema,
    }
    return described if one.example is None else described | {"example": one.example}


def _response(answers: list[DescribedResponse], schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"description": " Or: ".join(each.text for each in answers)}
    content: dict[str, dict[str, Any]] = {}
    for each in answers:
        if each.kind is None:
            continue
        schema, media = schemas[each.kind], content.setdefault(each.content, {})
        if each.lines:
            media["x-item-schema"] = schema
        elif "schema" in media and media["schema"] != schema:
            media["schema"] = {"anyOf": [*media["schema"].get("anyOf", [media["schema"]]), schema]}
        else:
            media["schema"] = schema
    if content:
        described["content"] = content
    links = {name: parameters for each in answers for name, parameters in each.links.items()}
    if links:
        described["links"] = {
            name: {"operationId": name, "parameters": dict(parameters)} for name, parameters in links.items()
        }
    return described
