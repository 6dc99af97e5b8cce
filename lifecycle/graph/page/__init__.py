"""The graph as a page: one file without requests to the network."""

import hashlib
import html
import json
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from string import Template

from lifecycle.graph.parts import Parts
from lifecycle.graph.timeline import Timeline, critical_path, held_by

__all__ = ["page", "part"]

SCRIPTS = (
    "elements.js",
    "model.js",
    "layout.js",
    "canvas.js",
    "pointers.js",
    "panel.js",
    "timeline.js",
    "main.js",
)
"""In order: each uses those before it."""


def page(
    graph: Parts, timeline: Timeline | None = None, health: Mapping[str, tuple[str, str]] | None = None
) -> str:
    """Return the page, with data, style and scripts."""
    script = "\n".join(['\n"use strict";', *map(part, SCRIPTS), ""])
    data = {
        "graph": json.loads(graph.json()),
        "timeline": json.loads(timeline.json()) if timeline else None,
        "held": held_by(graph, timeline) if timeline else {},
        "critical": critical_path(graph, timeline) if timeline else [],
        "health": health or {},
    }
    return Template(part("page.html")).substitute(
        title=html.escape(graph.name),
        style=part("look.css") + part("page.css"),
        # only "<" could end or hide the script element's content
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
        # no other script can run, whatever the data contain
        hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def part(name: str) -> str:
    """Return a file of the page, such as ``look.css`` and ``elements.js``. Raises FileNotFoundError."""
    return (files(__name__) / name).read_text(encoding="utf-8")
