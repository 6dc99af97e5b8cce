"""The JSON Schema of a graph's and a timeline's JSON, from the structs that are written and read.

Source: JSON Schema, draft 2020-12.
"""

import ast
import inspect
import textwrap
from typing import Any

import msgspec

from lifecycle.graph import parts, timeline, value

__all__ = ["graph_schema", "timeline_schema"]


def graph_schema() -> dict[str, Any]:
    """Return the schema of Graph.json()."""
    return _schema(value.Graph, parts.VERSION)


def timeline_schema() -> dict[str, Any]:
    """Return the schema of Timeline.json()."""
    return _schema(timeline.Timeline, timeline.VERSION)


def _schema(kind: type[msgspec.Struct], version: int) -> dict[str, Any]:
    (reference,), schemas = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for struct in (*vars(parts).values(), *vars(timeline).values()):
        name = getattr(struct, "__name__", "")
        if name in schemas and isinstance(struct, type):
            _describe(schemas[name]["properties"], struct)
    schemas[kind.__name__]["properties"]["version"] = {"const": version}
    schemas[kind.__name__]["required"].insert(0, "version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **reference,
        "$defs": dict(sorted(schemas.items())),
    }


def _describe(properties: dict[str, Any], struct: type) -> None:
    """The docstrings below the fields, as descriptions."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)  # noqa: S101  # the source of a class
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                properties[name]["description"] = " ".join(doc.split())
