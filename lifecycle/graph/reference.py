"""The reference of a hive's settings, from its cells: Markdown for readers, JSON Schema for programs."""

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from lifecycle.injection.cells import Cell, ConfigCell, ModuleCell
from lifecycle.settings import values
from lifecycle.settings.options import Group, Option, Settings, env_name
from lifecycle.settings.sources import Sources

__all__ = ["Section", "json_schema", "markdown", "sections"]

_SYNTAX: dict[str, str] = {
    "bool": "`true` or `false`; `1`, `t`, `T`, `True`, `TRUE` and their opposites too. A flag alone is true.",
    "int": "`16384`, `0x4000`.",
    "float": "`0.0025`.",
    "path": "A path of the file system.",
    "duration": "`15s`, `2m0s`, `100ms`. In a file or variable a bare number is nanoseconds, with a warning.",
    "quantity": "A whole amount: `512Mi`, `1.5G`, `2k`, `1e6`.",
    "mac": "`02:00:00:00:00:01`, `02-00-00-00-00-01` or `0200.0000.0001`.",
    "secret": "A text that is never shown. A file may hold it instead: see the setting.",
    "list": "Values with commas or spaces between; a flag may be given several times.",
    "map": "`key=value,key1=value1`, where values may hold commas, or a JSON object.",
    "optional": "Nothing is a value too: leave it empty.",
}


class Section(msgspec.Struct, frozen=True):
    """The settings of one struct."""

    module: str
    """The full id of its module."""
    title: str
    struct: type[Settings]
    options: tuple[Option, ...]


def sections(*cells: Cell) -> list[Section]:
    """Return every settings struct of the cells, in order. Builds nothing and reads no settings."""
    by_group: dict[Group, Section] = {}
    pending: list[tuple[Cell, str, str]] = [(cell, "", "") for cell in reversed(cells)]
    while pending:
        cell, module, title = pending.pop()
        if isinstance(cell, ModuleCell):
            module, title = f"{module}.{cell.id}".lstrip("."), cell.title
        if isinstance(cell, ConfigCell):
            for group in (Group(struct, cell.prefix) for struct in cell.structs):
                by_group.setdefault(group, Section(module, title, group.struct, group.options))
        pending += [(part, module, title) for part in reversed(getattr(cell, "cells", ()))]
    return list(by_group.values())


def json_schema(all_sections: Iterable[Section], title: str) -> str:
    """Return the schema of an object with all these settings, as JSON text."""
    from lifecycle.settings.schema import schema

    options = [option for section in all_sections for option in section.options]
    return json.dumps(schema(options, title), indent=2, ensure_ascii=False) + "\n"


def markdown(all_sections: Sequence[Section], title: str, introduction: str, sources: Sources) -> str:
    """Return a page with a table for each struct, the sources of settings, and the syntax of types."""
    lines = [f"# {title}", "", introduction, "", *_places(sources), ""]
    lines += ["| type | written as |", "|---|---|", *_syntax(all_sections), ""]
    for section in all_sections:
        lines += [f"## {_code(section.module)}{': ' if section.title else 'Settings'}{section.title}", ""]
        lines += [(inspect.getdoc(section.struct) or "").partition("\n\n")[0].replace("\n", " "), ""]
        lines += ["| setting | type | default | |", "|---|---|---|---|"]
        lines += [_row(option) for option in section.options]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _places(sources: Sources) -> Iterator[str]:
    prefix, yaml_name = sources.prefix or "HIVE_", sources.yaml_name
    yield "A setting takes its value from the first of these that has one:"
    yield ""
    yield "1. the flag, `--name=value`;"
    yield f"2. the environment variable, `{prefix}NAME` with `_` for every `-`; an empty one counts as unset;"
    places = [f"the file of that name in the directory given as `--config-dir` or `{prefix}CONFIG_DIR`;"]
    if (flag := sources.file_flag) is not None:
        variable = env_name(flag, prefix)
        places.insert(
            0, f"the YAML file given as `--{flag}` or `{variable}`, a mapping of settings to values;"
        )
    if yaml_name is not None:
        places.append(f"the file `{yaml_name}` in that directory, a YAML mapping of settings to values;")
    yield from (f"{number}. {place}" for number, place in enumerate([*places, "its default."], start=3))


def _syntax(all_sections: Iterable[Section]) -> Iterator[str]:
    kinds = [option.kind for section in all_sections for option in section.options]
    used = {word for kind in kinds for word in _words(kind)}
    yield from (f"| {word} | {text} |" for word, text in _SYNTAX.items() if word in used)


def _words(kind: object) -> Iterator[str]:
    """Yield the types inside a type, by the words of the table."""
    base, optional = values.bare(kind)
    if optional:
        yield "optional"
    if values.is_list(base) or values.is_map(base):
        yield "list" if values.is_list(base) else "map"
        yield from _words(values.items(base)[0])
    elif not values.choices(base):
        yield values.type_text(base)


def _row(option: Option) -> str:
    default = "required" if option.required else _code(option.default_text) or "nothing"
    notes = [option.help]
    if option.file_name:
        notes.append(f"Or `{option.file_name}`: a file that holds it.")
    if option.renamed_from:
        notes.append(f"Previously {', '.join(map(_code, option.renamed_from))}.")
    cells = (_code(option.name), option.type_text, default, " ".join(filter(None, notes)))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
