"""Settings in files: a config-dir, with a file for each option or one YAML file, and a separate YAML file."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lifecycle.settings.options import CONFIG_DIR, Option
from lifecycle.settings.raw_values import Findings, Layer, RawValue, hides, quoted
from lifecycle.settings.regular import read_regular
from lifecycle.settings.secrets import HIDDEN

if TYPE_CHECKING:
    from yaml import Node

__all__ = ["directory", "yaml_file"]

_TRIES = 10
"""Attempts to read a config-dir that is replaced meanwhile; the kubelet replaces it at most once a minute."""

_DATA = "..data"


def directory(
    path: Path, names: Mapping[str, Option], yaml_name: str | None, findings: Findings
) -> tuple[Layer, Layer]:
    """Return the settings in a config-dir: of its YAML file, if allowed, and of a file for each option.

    A mounted ConfigMap is replaced as a whole, by a link named ``..data`` through which all other links lead
    (see Kubernetes, "Projected volumes"): all values are read from one generation. If it changes during each
    attempt, this is a fault.
    """
    for _ in range(_TRIES):
        generation, seen = _generation(path), Findings(unknown=findings.unknown, others=findings.others)
        many: Layer = {}
        if yaml_name is not None:
            inside = path / generation  # a new key's link is created after the swap
            place = inside if (inside / yaml_name).exists() else path
            many = yaml_file(path / yaml_name, names, seen, place=place)
        single = _files(path, generation, names, seen, yaml_name)
        if _generation(path) == generation:
            if generation and not (path / _DATA).exists():
                seen.fault(
                    f"{path / _DATA}: it leads to {generation}, which is missing; expected a directory"
                )
            findings.faults += seen.faults
            findings.warnings += seen.warnings
            return many, single
    findings.fault(f"{CONFIG_DIR} {path}: it changed whenever it was read; leave it alone and start again")
    return {}, {}


def _generation(path: Path) -> str:
    """Return the target of ``..data``; empty without this link, if nothing is replaced as a whole."""
    try:
        return os.readlink(path / _DATA)  # noqa: PTH115  # its text is the generation
    except OSError:
        return ""


def _files(
    path: Path, generation: str, names: Mapping[str, Option], findings: Findings, yaml_name: str | None
) -> Layer:
    try:
        entries = dict.fromkeys(os.listdir(path), path)  # noqa: PTH208  # names only: half the time of iterdir
    except OSError as error:
        findings.fault(f"{CONFIG_DIR} {path}: {_reason(error)}; expected a directory")
        return {}
    if generation:
        try:
            entries = _swapped(path, entries, names, unknown=findings.unknown != "ignore")
        except OSError as error:
            findings.fault(f"{path / _DATA}: {_reason(error)}; expected a directory that can be read")
            return {}
    layer: Layer = {}
    for entry, place in sorted(entries.items()):
        name, shown_path = entry.lower(), path / entry
        if name in layer:
            findings.fault(f"{shown_path}: {layer[name].place} gives {name} too; expected each setting once")
            continue
        if name not in names:
            hidden = entry.startswith(".") or entry.endswith("~")  # created by a ConfigMap mount or an editor
            if not hidden and entry != yaml_name and findings.unknown != "ignore" and shown_path.is_file():
                findings.report_unknown(f"file {shown_path}", name, names)
            continue
        if (text := _text(place / entry, shown_path, findings)) is None:
            continue
        hidden = hides(name, names[name])
        if hidden and not text and names[name].file_name:  # not written yet: fail closed
            findings.fault(f"{shown_path}: it is empty; expected the value, or no such file")
        shown = f"{shown_path}: {HIDDEN if hidden else quoted(text)}"
        layer[name] = RawValue(text, name, f"file {shown_path}", shown, unitless=True)
    return layer


def _text(place: Path, shown: Path, findings: Findings) -> str | None:
    """Return the text of a setting's file.

    None if it was removed meanwhile or, with a fault, cannot be read.
    """
    try:
        return read_regular(place).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        if not isinstance(error, FileNotFoundError) or os.path.lexists(place):  # otherwise removed meanwhile
            findings.fault(f"{shown}: {_reason(error)}; expected a file that can be read")
        return None


def _swapped(
    path: Path, entries: Iterable[str], names: Mapping[str, Option], *, unknown: bool
) -> dict[str, Path]:
    """Return the path of each entry: entries that lead through ``..data`` are read there, in one generation.

    The link of a key is created after the generation that adds the key, and removed after the one that
    removes it. Raises OSError if ``..data`` cannot be read.
    """
    data = path / _DATA
    try:
        present = os.listdir(data)  # noqa: PTH208
    except FileNotFoundError:  # being removed: the next attempt reads its successor
        present = []
    paths = dict.fromkeys(present, data)
    for entry in entries:
        if entry not in paths and (entry.lower() in names or unknown) and not _is_data_link(path / entry):
            paths[entry] = path
    return paths


def _is_data_link(path: Path) -> bool:
    try:
        return os.readlink(path).partition("/")[0] == _DATA  # noqa: PTH115
    except FileNotFoundError:
        return True  # a swap has just removed this key's link
    except OSError:
        return False  # no link


def yaml_file(
    path: Path,
    names: Mapping[str, Option],
    findings: Findings,
    *,
    place: Path | None = None,
    flag: str | None = None,
) -> Layer:
    """Return the settings in a YAML mapping that options know; empty if there is no file.

    The file may be read at another path than the one users know. A file that a flag names must exist.
    """
    try:
        text = read_regular((place or path.parent) / path.name).decode()
    except (OSError, UnicodeDecodeError) as error:
        if flag:
            findings.fault(f"{flag} {path}: {_reason(error)}; expected a YAML file of settings")
        elif isinstance(error, NotADirectoryError):
            pass  # reported as a fault of the directory
        elif not isinstance(error, FileNotFoundError) or os.path.lexists((place or path.parent) / path.name):
            findings.fault(f"{path}: {_reason(error)}; expected a YAML file of settings")
        return {}
    layer: Layer = {}
    for key, value in _mapping(path, text, findings).items():
        if (option := names.get(name := str(key).lower())) is None:
            findings.report_unknown(f"{path}: {name}", name, names)
            continue
        shown = f"{path}: {name}: {HIDDEN if hides(name, option) else quoted(value)}"
        if isinstance(value, list) and not all(isinstance(part, str) for part in value):
            findings.fault(f"{shown}: expected a list of texts")
            continue
        layer[name] = RawValue(value, name, f"file {path}", shown, unitless=True)
    return layer


def _mapping(path: Path, text: str, findings: Findings) -> Mapping[object, object]:
    """Return the settings in a YAML text; empty, with a fault, if it is not a mapping."""
    import yaml  # imported only for such a file

    try:
        data = yaml.load(text, yaml.BaseLoader)  # noqa: S506  # it makes texts, lists and mappings only
    except (yaml.YAMLError, RecursionError) as error:
        position = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        findings.fault(f"{path}{position}: this is not YAML; expected a mapping of settings to values")
        return {}
    if (kind := _no_settings(data)) is not None:
        if data:
            findings.fault(f"{path}: {kind}expected a mapping of settings to values")
        return {}
    for name, line in _repeated(yaml.compose(text, yaml.BaseLoader)):
        findings.fault(f"{path}, line {line}: {name} is there twice; expected each setting once")
    mapping: Mapping[object, object] = data
    return mapping


def _repeated(mapping: "Node | None") -> Iterator[tuple[str, int]]:
    """Yield each repeated key of a YAML mapping, with its line; loading would keep the last value."""
    seen: set[str] = set()
    for key, _ in mapping.value if mapping else ():
        name = str(key.value).lower()
        if name in seen:
            yield name, key.start_mark.line + 1
        seen.add(name)


def _no_settings(data: object) -> str | None:
    """What a file contains instead of settings, as the beginning of an error; None for a mapping."""
    if not isinstance(data, dict):
        return ""
    return "this is a Kubernetes object; " if {"apiVersion", "kind"} <= data.keys() else None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else "it is not UTF-8 text"
