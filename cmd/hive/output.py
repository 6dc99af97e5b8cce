"""Output of commands: aligned tables, colour on terminals only; JSON, YAML or values for programs."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import click

GOOD, BAD, QUIET = "green", "red", "bright_black"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_NOT_COLOUR = re.compile(rf"(?!\x1b\[(?:0|3[1-6])m){_CONTROL.pattern}")
_CONTROL_NOT_STYLE = re.compile(rf"(?!\x1b\[[0-9;]*m){_CONTROL.pattern}")
_ESCAPES = {"\x1b": "^[", "\r": "\\r"}

TABLE, WIDE = "table", "wide"
_JSONPATH = "jsonpath="
_GAP = 3
_BELOW = 6
"""Indentation of a text below its name."""
_LEAST = 10
"""Minimum width of a shortened text."""


def terminal_text(text: str, *, coloured: bool = False) -> str:
    """Escape control characters, with which text from packets and peers could control the terminal.

    ESC becomes ``^[`` and CR ``\\r``, as in Cilium's hubble, others ``\\u0007``, so that JSON stays valid.
    Tabs and newlines stay, and with ``coloured`` the sequences of the six colours.
    """
    return (_CONTROL_NOT_COLOUR if coloured else _CONTROL).sub(_escaped, text)


def _styled_text(text: str) -> str:
    """Escape control characters except styles, which the commands themselves set."""
    return _CONTROL_NOT_STYLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}"


class _Form(click.ParamType[str]):
    """The form of the output: ``table``, ``wide``, ``json``, ``yaml`` or ``jsonpath=TEMPLATE``."""

    name = "form"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        form = str(value)
        if form.startswith(_JSONPATH):
            try:
                list(_parts(form.removeprefix(_JSONPATH)))
            except ValueError as error:
                self.fail(f"{form!r}: {error}", param, ctx)
        elif form not in {TABLE, WIDE, "json", "yaml"}:
            self.fail(f"{form!r}: expected table, wide, json, yaml or jsonpath='{{.path}}'", param, ctx)
        return form


F = TypeVar("F", bound=Callable[..., object])

output_option = click.option(
    "-o",
    "--output",
    type=_Form(),
    default=TABLE,
    show_default=True,
    metavar="FORM",
    help="Output format: table, wide (all columns), json, yaml or jsonpath='{.path}'.",
)


def page_options(command: F) -> F:
    """Options of commands that serve the page."""
    for option in (
        click.option(
            "--no-browser", is_flag=True, help="Only print the address of the page; open no browser."
        ),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=0,
            help="Port on 127.0.0.1; 0: any free port.  [default: 0]",
        ),
    ):
        command = option(command)
    return command


def document(value: object, form: str) -> str | None:
    """Return `value` for programs, or None for a table, which the command prints itself.

    In a jsonpath every ``{.path}`` (RFC 9535, without the leading ``$``, as in kubectl) is replaced by its
    values: strings unchanged, others as JSON, several separated by blanks.
    """
    if form in {TABLE, WIDE}:
        return None
    if form == "yaml":
        import yaml  # 25 ms that other commands do not need

        return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).rstrip("\n")
    if form == "json":
        return json_text(value)
    found = []
    for text, path in _parts(form.removeprefix(_JSONPATH)):
        found.append(text)
        if path is not None:
            found.append(" ".join(map(_plain, path.findall(value))))
    return "".join(found)


def shown_as_document(value: object, form: str) -> bool:
    """Print `value` for programs; return False for a table, which the command prints itself."""
    if (text := document(value, form)) is None:
        return False
    click.echo(text)
    return True


def _parts(template: str) -> Iterator[tuple[str, Any]]:
    """Yield text and the path after it, None after the last text. Raises ValueError with the fault."""
    import jsonpath  # 60 ms that other commands do not need

    position = 0
    for match in re.finditer(r"\{([^{}]*)\}", template):
        query = match[1].strip()
        if query.startswith(("range", "end")):
            raise ValueError("range is not supported: name the items as in {.items[*].name}")
        try:
            path = jsonpath.compile(query if query.startswith("$") else f"${query}")
        except jsonpath.JSONPathError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{{{match[1]}}} is not a path such as {{.cilium.state}}: {reason}") from None
        yield template[position : match.start()], path
        position = match.end()
    if position == 0:
        raise ValueError("expected a path in braces, such as {.cilium.state}")
    yield template[position:], None


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def json_text(value: object) -> str:
    """Return `value` as the JSON of ``-o json``."""
    return json.dumps(value, indent=2)


def terminal_width(*, err: bool = False) -> int | None:
    """Return the columns of the terminal, or None if the output goes elsewhere and may be wide."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def table_width(form: str) -> int | None:
    """Return the maximum width of a table: that of the terminal, or None with ``-o wide``."""
    return None if form == WIDE else terminal_width()


def table(rows: Sequence[Sequence[str]], header_lines: int = 1) -> list[str]:
    """Return lines with padded columns; the header is bold on a terminal.

    Widths are those of the visible text, without styles. Other control characters are escaped.
    """
    rows = [list(map(_styled_text, row)) for row in rows]
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = (
            cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(row, widths, strict=True)
        )
        line = "   ".join(cells).rstrip()
        lines.append(click.style(line, bold=True) if number < header_lines else line)
    return lines


def fact_lines(facts: Sequence[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Return names with their texts beside them; long texts continue below, with their style.

    Indented names are a section, which has a wider column if necessary.
    """
    least = max((len(name) for name, _ in facts if not name.startswith(" ")), default=0)
    for indented, section in groupby(facts, key=lambda fact: fact[0].startswith(" ")):
        rows = [(name, _styled_text(text)) for name, text in section]
        column = max(least, *(len(name) for name, _ in rows)) + _GAP
        for name, text in rows:
            beside = name.ljust(column) + text
            if width is None or len(click.unstyle(beside)) <= width:
                yield beside.rstrip()
            elif (indented and column > width // 2) or _widest(text) > width - column:
                yield from filter(None, [name])
                yield from (" " * _BELOW + line for line in _wrapped(text, width - _BELOW))
            else:
                first, *others = _wrapped(text, width - column)
                yield name.ljust(column) + first
                yield from (" " * column + line for line in others)


def _widest(text: str) -> int:
    return max(len(word) for word in click.unstyle(text).split(" "))


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap at blanks; a longer word, such as a path, has a line of its own."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and len(click.unstyle(longer)) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [line.rstrip(" ") for line in lines]


def line_fitted(line: str, width: int | None) -> list[str]:
    """Wrap a line at `width`; continuation lines are indented."""
    line = _styled_text(line)
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    if width is None or len(click.unstyle(line)) <= width:
        return [line]
    start, *_ = _wrapped(text, width - indent)
    rest = _wrapped(text[len(start) :].lstrip(" "), width - indent - 4)
    return [" " * indent + start, *(" " * (indent + 4) + part for part in rest)]


def echo_fitted(line: str, *, err: bool = False) -> None:
    """Print a line, wrapped at the terminal's width."""
    for part in line_fitted(line, terminal_width(err=err)):
        click.echo(part, err=err)


def cell_text(value: object) -> str:
    """Return a value as the text of a table's cell."""
    match value:
        case None | "" | [] | {}:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case float():
            return f"{value:.3f}".rstrip("0").rstrip(".")
        case list() if not any(isinstance(item, dict | list) for item in value):
            return ", ".join(map(cell_text, value))
    return json.dumps(value)


def detailed(
    header: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Sequence[str]]],
    width: int | None,
    below: Sequence[str] = (),
) -> list[str]:
    """Return a table of cells and their details, as the last column or, if that is too wide, below.

    Columns named `below` are also moved below as necessary; then the longest texts of the others are
    shortened.
    """
    beside = [header]
    for cells, details in rows:
        first, *others = details or [""]
        beside.append((*cells, first))
        beside.extend((*("",) * len(cells), other) for other in others)
    lines = table(beside)
    if width is None or _fits(lines, width):
        return lines
    columns = [header[:-1], *(cells for cells, _ in rows)]
    texts = [list(details) for _, details in rows]
    for name in below:
        if _fits(table(columns), width):
            break
        place = columns[0].index(name)
        for cells, under in zip(columns[1:], texts, strict=True):
            under.insert(0, cells[place])
        columns = [(*cells[:place], *cells[place + 1 :]) for cells in columns]
    head, *body = table(_cut(columns, width))
    result = [head]
    for line, under in zip(body, texts, strict=True):
        result.append(line)
        for text in filter(None, under):
            result += [click.style(f"    {part}", fg=QUIET) for part in _wrapped(text, width - 4)]
    return result


def _fits(lines: Sequence[str], width: int) -> bool:
    return all(len(click.unstyle(line)) <= width for line in lines)


def _cut(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Shorten the longest cells until a line fits, or none can be shortened further.

    Names of columns, the first row, are shortened last.
    """
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for least in ([max(_LEAST, len(name)) for name in rows[0]], [_LEAST] * len(widths)):
        while (excess := sum(widths) + _GAP * (len(widths) - 1) - width) > 0:
            spare = {place: widths[place] for place in range(len(widths)) if widths[place] > least[place]}
            if not spare:
                break
            longest = max(spare, key=spare.__getitem__)
            second = max((size for place, size in spare.items() if place != longest), default=0)
            shorter = min(second, widths[longest] - 1)
            widths[longest] = max(widths[longest] - excess, shorter, least[longest])
    return [[_short(cell, most) for cell, most in zip(row, widths, strict=True)] for row in rows]


def _wrap_last(rows: list[list[str]], width: int) -> list[list[str]]:
    """Fit rows: wrap the last column, or else shorten long texts."""
    others = [max(map(len, column)) + _GAP for column in list(zip(*rows, strict=True))[:-1]]
    left = width - sum(others)
    longest = max(rows, key=lambda row: len(row[-1]))[-1]
    if len(longest) <= left or left < 2 * _LEAST or " " not in longest:
        return _cut(rows, width)
    wrapped = []
    for row in rows:
        start, *more = _wrapped(row[-1], left)
        wrapped += [[*row[:-1], start], *([*("",) * len(others), part] for part in more)]
    return _cut(wrapped, width)


def _short(text: str, most: int) -> str:
    """Shorten a text by its middle, since names differ at their ends."""
    if len(click.unstyle(text)) <= most:
        return text
    start = most // 2
    return f"{text[:start]}…{text[len(text) - (most - start - 1) :]}"


def fitted(
    records: Sequence[Mapping[str, object]],
    width: int | None,
    more: str,
    columns: Sequence[str] = (),
    first: Sequence[str] = (),
) -> list[str]:
    """Return records as a table: `columns`, or all non-empty ones, as many as fit into `width`.

    The first name and the `first` columns are always shown: long texts are shortened, or wrapped in the last
    column. Of the others, wide columns are omitted first; a note names them and the option for `more`.
    """
    names = columns or list(dict.fromkeys(name for record in records for name in record))
    cells = {name: [cell_text(record.get(name)) for record in records] for name in names}
    filled = [name for name in cells if columns or any(cells[name])]
    needs = {name: max(map(len, (name, *cells[name]))) + _GAP for name in filled}
    fits = {name for name in filled if name in first} | set(filled[:1])
    used = sum(needs[name] for name in fits) - _GAP
    for name in sorted((name for name in filled if name not in fits), key=needs.__getitem__):
        if width is None or used + needs[name] <= width:
            fits.add(name)
            used += needs[name]
    shown = [name for name in filled if name in fits]
    hidden = [name for name in filled if name not in fits]
    body = zip(*(cells[name] for name in shown), strict=True)
    rows = [[name.upper() for name in shown], *map(list, body)]
    if first and width is not None and shown:
        rows = _wrap_last(rows, width)
    lines = table(rows)
    if not records:
        lines = [click.style("no rows", fg=QUIET)]
    if hidden:
        note = f"not shown: {', '.join(hidden)} ({more})"
        lines += [click.style(line, fg=QUIET) for line in textwrap.wrap(note, width or 80)]
    return lines
