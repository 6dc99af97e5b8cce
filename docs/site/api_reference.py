"""The pages that the site has of the code: what commands print, and the framework's API by its docstrings."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator

PACKAGES = (
    "lifecycle",
    "lifecycle.settings",
    "lifecycle.injection",
    "lifecycle.hooks",
    "lifecycle.jobs",
    "lifecycle.tables",
    "lifecycle.testing",
    "lifecycle.production",
    "lifecycle.admin",
    "lifecycle.command",
    "lifecycle.graph",
    "lifecycle.process",
    "lifecycle.http",
)
"""Those whose exports are for everybody; the others are parts of `lifecycle` itself."""

COMMANDS = {
    "reference/settings.md": ("config", "reference"),
    "reference/settings.schema.json": ("config", "reference", "--format", "schema"),
    "reference/operator-settings.md": ("config", "reference", "--of", "operator"),
    "reference/operator-settings.schema.json": (
        "config",
        "reference",
        "--of",
        "operator",
        "--format",
        "schema",
    ),
    "reference/openapi.json": ("api", "-o", "json"),
    "reference/graph-schema.json": ("inspect", "--schema"),
    "reference/timeline-schema.json": ("inspect", "--timeline", "--schema"),
}
"""Files of the site, and the words of ``hive`` that print them."""

FRAMEWORK = "reference/lifecycle.md"
"""The page that reference() writes."""

INTRODUCTION = """\
# The framework's API

Every name that `lifecycle` and its public packages export, with its docstring.

Begin with the [tutorial](../lifecycle/tutorial.md).
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def reference() -> str:
    """The page."""
    parts = [INTRODUCTION]
    first: dict[int, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        parts.append(f"## {package}\n\n{_paragraphs(inspect.getdoc(module) or '')}\n")
        for name in sorted(module.__all__, key=str.casefold):
            thing = getattr(module, name)
            if (before := first.setdefault(id(thing), package)) != package:
                parts.append(f"### {name}\n\nSee {before}.\n")
                continue
            parts.append(f"### {name}\n\n{_entry(name, thing)}")
    return "\n".join(parts)


def _entry(name: str, thing: object) -> str:
    if inspect.isfunction(thing):
        return _function(_definition(thing))
    if isinstance(thing, type) and thing.__module__.startswith("lifecycle"):
        return _class(_definition(thing), [_definition(base) for base in _hidden_bases(thing)])
    return f"```python\n{name}: {type(thing).__name__}\n```\n"


def _hidden_bases(kind: type) -> list[type]:
    """Its bases that are exported nowhere: their members are listed with it."""
    exported = {
        id(thing) for package in PACKAGES for thing in vars(importlib.import_module(package)).values()
    }
    return [
        base
        for base in kind.__mro__[1:]
        if base.__module__.startswith("lifecycle") and id(base) not in exported
    ]


def _definition(thing: object) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]  # type: ignore[arg-type]  # it has source


def _function(node: ast.stmt) -> str:
    assert isinstance(node, Function)
    return f"```python\n{_signature(node)}\n```\n\n{_paragraphs(ast.get_docstring(node) or '')}\n"


def _class(node: ast.stmt, hidden: Iterable[ast.stmt] = ()) -> str:
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(map(ast.unparse, node.bases))
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    made = [one for one in node.body if isinstance(one, Function) and one.name == "__init__"]
    lines += [textwrap.indent(_signature(one), "    ") for one in made]
    parts = ["```python\n" + "\n".join(lines) + "\n```\n", _paragraphs(ast.get_docstring(node) or "") + "\n"]
    described: dict[str, str] = {}
    for one in (node, *hidden):
        assert isinstance(one, ast.ClassDef)
        for name, line in _members(one):
            described.setdefault(name, line)
    parts += [f"* {line}" for line in described.values()]
    return "\n".join(parts) + ("\n" if parts[-1].startswith("* ") else "")


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Fields and methods by name, each with its docstring as one paragraph."""
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            if not member.target.id.startswith("_"):
                yield member.target.id, _item(f"`{ast.unparse(member)}`", _text_after(after))
        elif isinstance(member, Function) and not member.name.startswith("_"):
            marks = {ast.unparse(one) for one in member.decorator_list}
            if "overload" in marks or ast.get_docstring(member) is None:
                continue
            doc = " ".join((ast.get_docstring(member) or "").split())
            if marks & {"property", "functools.cached_property"}:
                result = f": {ast.unparse(member.returns)}" if member.returns else ""
                yield member.name, _item(f"`{member.name}{result}`", doc)
            else:
                yield member.name, _item(f"`{_signature(member).removeprefix('def ')}`", doc)


def _item(head: str, doc: str) -> str:
    return f"{head}: {doc}" if doc else head


def _text_after(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


def _signature(node: Function) -> str:
    arguments = ast.unparse(node.args)
    for own in ("self, ", "cls, "):
        arguments = arguments.removeprefix(own)
    arguments = "" if arguments in {"self", "cls"} else arguments
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{kind} {node.name}({arguments}){result}"


def _paragraphs(doc: str) -> str:
    """A docstring as Markdown: indented parts are code, doubled backticks are single ones."""
    found = []
    for part in doc.split("\n\n"):
        lines = part.splitlines()
        if all(line.startswith("    ") for line in lines) and lines:
            found.append(f"```text\n{textwrap.dedent(part)}\n```")
        else:
            found.append(part.replace("``", "`"))
    return "\n\n".join(found)
