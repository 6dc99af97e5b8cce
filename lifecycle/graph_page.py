"""The graph as a page: one file that asks the network for nothing.

Needs:  a Graph, and a Timeline when there is one; the parts of the page in lifecycle/page/.
Gives:  page().
"""

import html
import json
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lifecycle.graph import Graph
    from lifecycle.graph_timeline import Timeline

__all__ = ["page"]

SCRIPTS = ("model.js", "layout.js", "canvas.js", "panel.js", "timeline.js", "main.js")
"""In this order: each uses those before it."""


def page(graph: "Graph", timeline: "Timeline | None" = None) -> str:
    """The page, with the data, the style and the scripts inside it."""
    from lifecycle.graph_timeline import critical_path, held_by

    folder = files("lifecycle") / "page"
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
