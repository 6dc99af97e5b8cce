"""The help of a hive's command: commands and settings."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping

from lifecycle.hive.hive import Hive
from lifecycle.settings.options import CONFIG_DIR, Option, env_name
from lifecycle.settings.sources import Sources

__all__ = ["page"]

_COLUMN = 26
_NARROWEST, _WIDEST = 40, 100


def page(hive: Hive, commands: Mapping[str, str], *, version: bool) -> str:
    """Return the page, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    lines = [f"Usage: {hive.name} [COMMAND] [--SETTING=VALUE]...", ""]
    lines += ["Commands:", *(line for name, text in commands.items() for line in _row(name, text, width))]
    lines += ["", "Flags:", *_row("-h, --help", "Show this.", width)]
    lines += _row("--version", "Show the version.", width) if version else []
    lines += _row("--strict", "Refuse keys of files, and variables, that are no settings.", width)
    lines += ["", *textwrap.wrap(_places(hive), width)]
    for module, title, options in hive.option_groups():
        lines += ["", f"{module}: {title}" if title != module else f"{module}:"]
        for option in options:
            lines += _row(f"--{option.name} {_kind(option)}", _text(option), width)
    return "\n".join(lines) + "\n"


def _places(hive: Hive) -> str:
    sources = hive.sources or Sources()
    prefix = hive.env_prefix if sources.prefix is None else sources.prefix
    places = ["a flag (--name=value)", f"a variable ({prefix}NAME)"]
    if sources.file_flag:
        places.append(f"a key of the YAML file given as --{sources.file_flag}")
    places.append(
        f"a file of that name in the directory given as --{CONFIG_DIR} ({env_name(CONFIG_DIR, prefix)})"
    )
    if sources.yaml_name:
        places.append(f"a key of {sources.yaml_name} in that directory")
    return (
        f"Settings. The first of these that has it: {', else '.join(places)}, else the default in brackets."
    )


def _kind(option: Option) -> str:
    return option.type_text.removesuffix(", optional").replace(" ", "-").upper()


def _text(option: Option) -> str:
    default = "required" if option.required else option.default_text or "nothing"
    return f"{option.help} [{default}]".strip()


def _row(name: str, text: str, width: int) -> Iterator[str]:
    """Yield a name and its text in two columns; the text is below a long name."""
    indent = " " * _COLUMN
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    head = f"  {name}"
    if len(head) < _COLUMN - 1 and lines:
        yield head.ljust(_COLUMN) + lines.pop(0)[_COLUMN:]
    else:
        yield head
    yield from lines
