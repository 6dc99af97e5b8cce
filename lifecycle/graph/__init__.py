"""The graph of a hive as a value: drawings, queries, comparison, JSON, the HTML page."""

from lifecycle.graph.diff import Change as GraphChange
from lifecycle.graph.diff import ChangedField, diff
from lifecycle.graph.parts import (
    ConstructorInfo,
    Edge,
    FaultInfo,
    HookInfo,
    InvokeInfo,
    ModuleInfo,
    SettingInfo,
)
from lifecycle.graph.query import circles, find_module, unused, why
from lifecycle.graph.reference import json_schema, markdown, sections
from lifecycle.graph.schema import graph_schema, timeline_schema
from lifecycle.graph.timeline import Span, Timeline, critical_path, held_by, read_timeline
from lifecycle.graph.value import Graph, page_part, read_graph
from lifecycle.graph.views import differences, show
from lifecycle.injection.cycles import Circle

__all__ = [
    "ChangedField",
    "Circle",
    "ConstructorInfo",
    "Edge",
    "FaultInfo",
    "Graph",
    "GraphChange",
    "HookInfo",
    "InvokeInfo",
    "ModuleInfo",
    "SettingInfo",
    "Span",
    "Timeline",
    "circles",
    "critical_path",
    "diff",
    "differences",
    "find_module",
    "graph_schema",
    "held_by",
    "json_schema",
    "markdown",
    "page_part",
    "read_graph",
    "read_timeline",
    "sections",
    "show",
    "timeline_schema",
    "unused",
    "why",
]
