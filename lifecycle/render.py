"""The graph for eyes: a text tree, Graphviz, Mermaid.

Needs:  a Graph.
Gives:  tree(), dot(), mermaid().
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lifecycle.graph import Graph, ModuleInfo

__all__ = ["dot", "mermaid", "tree"]


def tree(graph: "Graph", top: str | None = None) -> str:
    """Modules indented, below each what it sets, provides, invokes and runs; all, or `top` and below."""
    children = defaultdict(list)
    for module in graph.modules:
        children[module.parent].append(module)
    lines: list[str] = []
    first = children[None] if top is None else [module for module in graph.modules if module.id == top]
    pending = [(module, 0) for module in reversed(first)]
    while pending:
        module, depth = pending.pop()
        title = f"  {module.title}" if module.title != module.id else ""
        name = module.id if module.id == top else module.id.rpartition(".")[2]
        lines.append(f"{'  ' * depth}{name}{title}")
        for line in _contents(graph, module):
            lines += _wrapped(line, "  " * (depth + 1))
        pending += [(child, depth + 1) for child in reversed(children[module.id])]
    return "\n".join(lines) + "\n"


def _contents(graph: "Graph", module: "ModuleInfo") -> Iterator[str]:
    for setting in graph.settings:
        if setting.module == module.id:
            source = "" if setting.origin == "default" else f"  ({setting.origin})"
            yield f"· set     {setting.name} = {setting.value or '(nothing)'}{source}"
    names = {node.id: node.provides for node in graph.constructors}
    needs = defaultdict(list)
    for edge in graph.edges:
        needs[edge.source].append(names[edge.target])
    for node in graph.constructors:
        if node.module != module.id or node.kind in {"config", "part"}:  # a whole tells its parts
            continue
        shown = node.provides if node.name == node.provides else f"{node.provides} from {node.name}"
        marks = {
            "private": node.private,
            node.kind: node.kind != "provide",
            "replaced": node.replaced,
            "not needed": not node.built and not node.replaced,
        }
        held = ", ".join(mark for mark, holds in marks.items() if holds)
        yield f"· provide {shown}{f' ({held})' if held else ''}{_needs(needs[node.id])}"
    for root in graph.invokes:
        if root.module == module.id:
            yield f"· invoke  {root.name}{_needs(needs[root.id])}"
    for hook in graph.hooks:
        if hook.module == module.id:
            yield f"· hook    {hook.name}"


def _wrapped(line: str, indent: str) -> list[str]:
    """At 80 columns; what does not fit goes on below the name of the thing."""
    import textwrap  # who draws no tree does not need it

    below = indent + " " * len("· provide ")
    return textwrap.wrap(
        line,
        80,
        initial_indent=indent,
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _needs(types: list[str]) -> str:
    counts = Counter(types)  # the members of a group have one type
    named = (name if count == 1 else f"{count} x {name}" for name, count in counts.items())
    return " <- " + ", ".join(named) if types else ""


def dot(graph: "Graph") -> str:
    """A cluster per module; invoked functions are ellipses, private constructors dashed."""
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, fontname="sans-serif"];',
    ]
    children = defaultdict(list)
    for module in graph.modules:
        children[module.parent].append(module)

    # modules nest as deep as people write them: recursion is fine here
    def cluster(module: "ModuleInfo", indent: str) -> None:
        lines.append(f"{indent}subgraph {_quoted(f'cluster_{module.id}')} {{")
        lines.append(f"{indent}  label={_quoted(module.title)};")
        for node in graph.constructors:
            if node.module == module.id and not node.replaced:
                style = ", style=dashed" if node.private else ""
                lines.append(f"{indent}  {_quoted(node.id)} [label={_quoted(node.provides)}{style}];")
        for root in graph.invokes:
            if root.module == module.id:
                lines.append(f"{indent}  {_quoted(root.id)} [label={_quoted(root.name)}, shape=ellipse];")
        for child in children[module.id]:
            cluster(child, indent + "  ")
        lines.append(f"{indent}}}")

    for module in children[None]:
        cluster(module, "  ")
    lines += [f"  {_quoted(edge.source)} -> {_quoted(edge.target)};" for edge in graph.edges]
    return "\n".join((*lines, "}", ""))


def mermaid(graph: "Graph") -> str:
    """A subgraph per module; invoked functions are round, private constructors have cut corners."""
    children = defaultdict(list)
    for module in graph.modules:
        children[module.parent].append(module)
    shown = [node for node in graph.constructors if not node.replaced]
    # ids of ours may hold anything, those of Mermaid letters and digits
    short = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
    scopes = {module.id: f"m{number}" for number, module in enumerate(graph.modules)}
    lines = ["flowchart LR"]

    def subgraph(module: "ModuleInfo", indent: str) -> None:
        lines.append(f"{indent}subgraph {scopes[module.id]}[{_mermaid(module.title)}]")
        for node in shown:
            if node.module == module.id:
                left, right = ("{{", "}}") if node.private else ("[", "]")
                lines.append(f"{indent}  {short[node.id]}{left}{_mermaid(node.provides)}{right}")
        for root in graph.invokes:
            if root.module == module.id:
                lines.append(f"{indent}  {short[root.id]}([{_mermaid(root.name)}])")
        for child in children[module.id]:
            subgraph(child, indent + "  ")
        lines.append(f"{indent}end")

    for module in children[None]:
        subgraph(module, "  ")
    lines += [f"  {short[edge.source]} --> {short[edge.target]}" for edge in graph.edges]
    return "\n".join((*lines, ""))


def _mermaid(text: str) -> str:
    """In double quotes, with Mermaid's entities for what it would read as its own."""
    entities = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}
    return '"' + "".join(entities.get(letter, letter) for letter in text) + '"'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
