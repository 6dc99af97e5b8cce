"""The graph as a text tree."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from lifecycle.graph.faults import Marks
from lifecycle.graph.parts import ModuleInfo, Parts
from lifecycle.settings.sources import UNSET

__all__ = ["tree"]


def tree(graph: Parts, top: str | None = None) -> str:
    """Modules, indented, each with settings, constructors, invoked functions and hooks; all, or from `top`
    on.
    """
    children = defaultdict(list)
    for module in graph.modules:
        children[module.parent].append(module)
    lines: list[str] = []
    faults = Marks(graph)
    first = children[None] if top is None else [module for module in graph.modules if module.id == top]
    pending = [(module, 0) for module in reversed(first)]
    while pending:
        module, depth = pending.pop()
        title = f"  {module.title}" if module.title != module.id else ""
        name = module.id if module.id == top else module.id.rpartition(".")[2]
        lines.append(f"{'  ' * depth}{name}{title}")
        for line in _contents(graph, faults, module):
            lines += _wrapped(line, "  " * (depth + 1))
        pending += [(child, depth + 1) for child in reversed(children[module.id])]
    return "\n".join(lines) + "\n"


def _contents(graph: Parts, faults: Marks, module: ModuleInfo) -> Iterator[str]:
    yield from _settings(graph, faults, module)
    names = {node.id: node.provides for node in graph.constructors}
    needs: Mapping[str, list[str]] = defaultdict(list)
    after: Mapping[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        (after if edge.order else needs)[edge.source].append(names[edge.target])
    for user, lacks, kind in faults.lacking:
        needs[user].append(f"{lacks} ({kind})")
    for node in graph.constructors:
        if node.module != module.id or node.kind in {"config", "part"}:  # parts: with their whole
            continue
        shown = node.provides if node.name == node.provides else f"{node.provides} from {node.name}"
        marks = {
            "private": node.private,
            node.kind: node.kind != "provide",
            "replaced": node.replaced,
            "not needed": not node.built and not node.replaced,
            **dict.fromkeys(faults.of(node.id), True),
        }
        notes = ", ".join(mark for mark, holds in marks.items() if holds)
        yield f"· provide {shown}{f' ({notes})' if notes else ''}{_needs(needs[node.id], after[node.id])}"
    for root in graph.invokes:
        if root.module == module.id:
            notes = ", ".join(faults.of(root.id))
            needed = _needs(needs[root.id], after[root.id])
            yield f"· invoke  {root.name}{f' ({notes})' if notes else ''}{needed}"
    for hook in graph.hooks:
        if hook.module == module.id:
            yield f"· hook    {hook.name}"


def _settings(graph: Parts, faults: Marks, module: ModuleInfo) -> Iterator[str]:
    """Number of settings by kind; a list of them would be longer than the graph."""
    counts = Counter(
        {"default": "default", UNSET: "required and unset"}.get(setting.origin, "given")
        for setting in graph.settings
        if setting.module == module.id
    )
    if total := counts.total():
        more = "".join(f", {counts[kind]} {kind}" for kind in ("given", "required and unset") if counts[kind])
        structs = [
            node.id for node in graph.constructors if node.module == module.id and node.kind == "config"
        ]
        words = dict.fromkeys(word for struct in structs for word in faults.of(struct))
        suffix = f" ({', '.join(words)})" if words else ""
        yield f"· set     {total} {'setting' if total == 1 else 'settings'}{more}{suffix}"


def _wrapped(line: str, indent: str) -> list[str]:
    """Wrap at 80 columns; further lines are indented below the name."""
    import textwrap  # imported only to draw a tree

    below = indent + " " * len("· provide ")
    return textwrap.wrap(
        line,
        80,
        initial_indent=indent,
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _needs(types: list[str], after: list[str]) -> str:
    needed = f" <- {_counted(types)}" if types else ""
    return f"{needed} after {_counted(after)}" if after else needed


def _counted(types: list[str]) -> str:
    counts = Counter(types)  # the members of a group have one type
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
