"""The graph as a page: one file that asks the network for nothing.

Needs:  a Graph, and a Timeline when there is one; the parts of the page beside this file.
Gives:  page().
"""

import html
import json
from importlib.resources import files
from string import Template

from lifecycle.graph.parts import Parts
from lifecycle.graph.timeline import Timeline, critical_path, held_by

__all__ = ["page"]

SCRIPTS = ("model.js", "layout.js", "canvas.js", "pointers.js", "panel.js", "timeline.js", "main.js")
"""In this order: each uses those before it."""


def page(graph: Parts, timeline: Timeline | None = None) -> str:
    """The page, with the data, the style and the scripts inside it."""
    folder = files(__name__)
    parts = {
        name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)
    }
    data = {
        "graph": json.loads(graph.json()),
        "timeline": json.loads(timeline.json()) if timeline else None,
        "held": held_by(graph, timeline) if timeline else {},
        "critical": critical_path(graph, timeline) if timeline else [],
    }
    return Template(parts["page.html"]).substitute(
        title=html.escape(graph.name),
        style=parts["page.css"],
        # inside a script element only this sequence could end it, or hide what follows
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        script="\n".join(parts[name] for name in SCRIPTS),
    )
