"""The graph for Graphviz and Mermaid.

Faults are red: constructors with faults, edges of cycles, and boxes for missing dependencies.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator

from lifecycle.graph.faults import Marks
from lifecycle.graph.parts import ConstructorInfo, InvokeInfo, ModuleInfo, Parts

__all__ = ["dot", "mermaid"]

RED = "#c62828"


def dot(graph: Parts) -> str:
    """A cluster for each module; invoked functions are ellipses, private constructors are dashed.

    A dashed edge leads to a constructor that is only ordered before.
    """
    faults = Marks(graph)
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, fontname="sans-serif"];',
    ]

    def box(node: str, name: str, style: str = "") -> str:
        words = faults.of(node)
        red = f', color="{RED}", fontcolor="{RED}", penwidth=2' if words else ""
        return f"{_quoted(node)} [label={_quoted(_lines(name, *words))}{style}{red}];"

    def begin(module: ModuleInfo) -> list[str]:
        return [f"subgraph {_quoted(f'cluster_{module.id}')} {{", f"  label={_quoted(module.title)};"]

    def provided(node: ConstructorInfo) -> str:
        return box(node.id, node.provides, ", style=dashed" if node.private else "")

    def invoked(root: InvokeInfo) -> str:
        return box(root.id, root.name, ", shape=ellipse")

    lines += _nested(graph, begin, provided, invoked, "}")
    for edge in graph.edges:
        styles = [f'color="{RED}", penwidth=2'] * ((edge.source, edge.target) in faults.edges)
        styles += ["style=dashed"] * edge.order
        attributes = f" [{', '.join(styles)}]" if styles else ""
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{attributes};")
    for lacks, kind in faults.lacks.items():
        style = f'shape=octagon, style=dashed, color="{RED}", fontcolor="{RED}", penwidth=2'
        lines.append(f"  {_quoted(f'{kind} {lacks}')} [label={_quoted(_lines(lacks, kind))}, {style}];")
    for node, lacks, kind in faults.lacking:
        lines.append(f'  {_quoted(node)} -> {_quoted(f"{kind} {lacks}")} [color="{RED}", penwidth=2];')
    return "\n".join((*lines, "}", ""))


def mermaid(graph: Parts) -> str:
    """A subgraph for each module; invoked functions are round, private constructors have cut corners.

    A dashed edge leads to a constructor that is only ordered before.
    """
    faults = Marks(graph)
    # our ids contain any character, Mermaid's only letters and digits
    short = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
    scopes = {module.id: f"m{number}" for number, module in enumerate(graph.modules)}
    ghosts = {lacks: f"x{number}" for number, lacks in enumerate(faults.lacks)}

    def box(node: str, name: str, left: str, right: str) -> str:
        words = faults.of(node)
        return f"{short[node]}{left}{_mermaid(name, *words)}{right}{':::fault' if words else ''}"

    def begin(module: ModuleInfo) -> list[str]:
        return [f"subgraph {scopes[module.id]}[{_mermaid(module.title)}]"]

    def provided(node: ConstructorInfo) -> str:
        return box(node.id, node.provides, *(("{{", "}}") if node.private else ("[", "]")))

    def invoked(root: InvokeInfo) -> str:
        return box(root.id, root.name, "([", "])")

    lines = ["flowchart LR", *_nested(graph, begin, provided, invoked, "end")]
    for edge in graph.edges:
        arrow = "-.->" if edge.order else "-->"
        lines += [f"  {short[edge.source]} {arrow} {short[edge.target]}"]
    lines += (f"  {ghosts[lacks]}[/{_mermaid(lacks, kind)}/]:::fault" for lacks, kind in faults.lacks.items())
    lines += (f"  {short[node]} -.-> {ghosts[lacks]}" for node, lacks, _ in faults.lacking)
    if graph.faults:
        lines.append(f"  classDef fault stroke:{RED},stroke-width:2px,color:{RED}")
        red = [index for index, edge in enumerate(graph.edges) if (edge.source, edge.target) in faults.edges]
        red += range(len(graph.edges), len(graph.edges) + len(faults.lacking))
        if red:
            lines.append(f"  linkStyle {','.join(map(str, red))} stroke:{RED},stroke-width:2px")
    return "\n".join((*lines, ""))


def _nested(
    graph: Parts,
    begin: Callable[[ModuleInfo], list[str]],
    provided: Callable[[ConstructorInfo], str],
    invoked: Callable[[InvokeInfo], str],
    end: str,
) -> Iterator[str]:
    """Yield the modules, nested and indented, with their contents."""
    children = defaultdict(list)
    for module in graph.modules:
        children[module.parent].append(module)

    # recursion is safe: nesting is shallow
    def inside(module: ModuleInfo, indent: str) -> Iterator[str]:
        yield from (f"{indent}{line}" for line in begin(module))
        for node in graph.constructors:
            if node.module == module.id and not node.replaced:
                yield f"{indent}  {provided(node)}"
        for root in graph.invokes:
            if root.module == module.id:
                yield f"{indent}  {invoked(root)}"
        for child in children[module.id]:
            yield from inside(child, indent + "  ")
        yield f"{indent}{end}"

    for module in children[None]:
        yield from inside(module, "  ")


def _lines(*texts: str) -> str:
    return "\n".join(texts)


def _mermaid(*texts: str) -> str:
    """Lines in double quotes, with Mermaid's entities for characters with a meaning there."""
    entities = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}
    return '"' + "<br>".join("".join(entities.get(letter, letter) for letter in text) for text in texts) + '"'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
