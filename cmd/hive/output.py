"""How the command prints: aligned tables, colour on terminals only, JSON for programs.

Needs: click (it drops colours when the output is not a terminal).   Gives: table(), json_text(), the options.
"""

import json
import shutil
import sys
from collections.abc import Sequence

import click

GOOD, BAD, QUIET = "green", "red", "bright_black"

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="For people, or for programs.",
)


def json_text(value: object) -> str:
    """`value` as the JSON that ``-o json`` prints."""
    return json.dumps(value, indent=2)


def terminal_width() -> int | None:
    """Columns of the terminal we print on, or None when the output goes elsewhere and may be wide."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(rows: Sequence[Sequence[str]], header_lines: int = 1) -> list[str]:
    """Lines with columns padded to their widest cell; the header is bold on a terminal.

    Cells may be styled: what the eye sees is measured.
    """
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = (
            cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(row, widths, strict=True)
        )
        line = "   ".join(cells).rstrip()
        lines.append(click.style(line, bold=True) if number < header_lines else line)
    return lines
