"""A page of text with files, as in Go's txtar: the script first, then each file under its name.

Source: golang.org/x/tools/txtar. A line ``-- name --`` begins a file; the script is before the first one.
"""

import re

import msgspec

__all__ = ["Archive", "parse"]

_MARKER = re.compile(r"^-- (?P<name>\S(?:.*\S)?) --[ \t]*$")


class Archive(msgspec.Struct, frozen=True):
    """A script and its files by name."""

    script: str
    files: dict[str, str]

    def text(self) -> str:
        """Return the page: parse() returns an equal archive, with a line end added to each part."""
        parts = [_ended(self.script)]
        for name, content in self.files.items():
            parts += [f"-- {name} --\n", _ended(content)]
        return "".join(parts)


def parse(page: str) -> Archive:
    """Return the parts of a page.

    Raises ValueError("line N: ...") for a name that comes twice or leads outside.
    """
    script: list[str] = []
    files: dict[str, list[str]] = {}
    current = script
    for number, line in enumerate(page.splitlines(keepends=True), start=1):
        marker = _MARKER.match(line.rstrip("\r\n"))
        if marker is None:
            current.append(line)
            continue
        name = marker["name"]
        if name in files:
            raise ValueError(f"line {number}: the file {name} is there twice; give one another name")
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(
                f"line {number}: the file {name} leads outside; expected a name such as a/b.yaml"
            )
        current = files[name] = []
    return Archive("".join(script), {name: "".join(lines) for name, lines in files.items()})


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
