"""What each place says of settings: flags, environment, config-dir, code.

Needs:  the options there are.
Gives:  Given, a value as some place gave it, and one function per place. Nothing is raised: what is wrong
        goes into Findings.

An unknown flag is a mistake. A variable with the prefix, a key of a file or a file of a config-dir that no
option knows is told with what is near, refused, or other programs' business, as the Sources say. Values of
secrets are never part of what is told.
"""

import functools
import os
import re
import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from lifecycle.errors import Fault
from lifecycle.settings import values
from lifecycle.settings.options import CONFIG_DIR, Option, env_name
from lifecycle.settings.regular import read_regular
from lifecycle.settings.secrets import HIDDEN

if TYPE_CHECKING:
    from yaml import Node

__all__ = [
    "Findings",
    "Given",
    "Layer",
    "Unknown",
    "by_name",
    "code",
    "directory",
    "environment",
    "flags",
    "settled",
    "yaml_file",
]


class Given(msgspec.Struct, frozen=True):
    """A value as some place gave it, not yet read."""

    raw: object
    """A text, the texts of a flag given several times, or in code any value."""
    name: str
    """As which it was given: an option has old names too, a secret the name of its file."""
    place: str
    """For origins."""
    shown: str
    """For errors: place and value as the user wrote them."""
    unitless: bool = False
    """Whether a bare whole number is a duration in nanoseconds, as Cilium reads files and variables."""

    def __repr__(self) -> str:
        return self.shown


Unknown = Literal["warn", "refuse", "ignore"]
"""What to do about a key that no option knows."""


class Findings(msgspec.Struct):
    """What is wrong, and what is only odd."""

    faults: list[Fault] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    unknown: Unknown = "ignore"

    def fault(self, text: str) -> None:
        """Note a mistake in the settings."""
        self.faults.append(Fault("setting", text))

    def stranger(self, shown: str, name: str, names: Mapping[str, Option], prefix: str = "") -> None:
        """Note a key that no option knows; `shown` is its place, without the value, which might be secret."""
        if self.unknown == "refuse":
            self.fault(_unknown(shown, name, names, prefix))
        elif self.unknown == "warn":
            self.warnings.append(f"{_unknown(shown, name, names, prefix)}; it is ignored")


_SHOWN = 200
"""Characters of a value that an error shows."""

_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxlist, _brief.maxdict = 2, 20, 20
_brief.maxstring = _brief.maxother = _SHOWN

_TRIES = 10
"""How often a config-dir is read that is swapped meanwhile; the kubelet swaps once a minute at most."""

_DATA = "..data"

_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""Variables that Kubernetes gives every container for each Service; one may have the name of a hive."""

Layer = dict[str, Given]
"""What one place gave: by the name it was given as, or once settled() by option."""


def by_name(options: Iterable[Option]) -> dict[str, Option]:
    """The options by every name they have."""
    return {name: option for option in options for name in option.names}


def flags(
    argv: Sequence[str],
    names: Mapping[str, Option],
    findings: Findings,
    places: Iterable[str] = (CONFIG_DIR,),
) -> Layer:
    """``--name=value``, ``--name value``, ``--name`` for a boolean; flags for places, no options, too."""
    found: Layer = {}
    words = deque(argv)
    while words:
        word = words.popleft()
        name, equals, text = word[2:].partition("=")
        name = name.lower()
        option = names.get(name)
        if not word.startswith("--") or word == "--":
            findings.fault(_stray(word, names))
            continue
        if option is None and name not in places:
            findings.fault(_unknown(f"--{name}", name, names, "--"))
            if not equals and words and not words[0].startswith("--"):
                words.popleft()  # its value is no mistake of its own
            continue
        if not equals and option is not None and values.bare(option.kind)[0] is bool:
            text = "true"
        elif not equals:
            if not words:
                findings.fault(f"--{name}: needs a value, as in --{name}=VALUE")
                continue
            text = words.popleft()
        raw: object = text
        if option is not None and (values.is_list(option.kind) or values.is_map(option.kind)):
            before = found[name].raw if name in found else []
            raw = [*before, text]  # type: ignore[misc]  # lists are only ever put here as lists
        found[name] = Given(raw, name, f"flag --{name}", f"--{name}={_masked(text, name, option)}")
    return found


def environment(
    env: Mapping[str, str],
    prefix: str,
    names: Mapping[str, Option],
    findings: Findings,
    places: Iterable[str] = (CONFIG_DIR,),
) -> Layer:
    """``PREFIX_NAME``; the variables are in upper case here, and none is empty."""
    found: Layer = {}
    known = {env_name(place, prefix) for place in places}
    for name, option in names.items():
        variable = env_name(name, prefix)
        known.add(variable)
        if (text := env.get(variable)) is not None:
            shown = f"{variable}={_masked(text, name, option)}"
            found[name] = Given(text, name, variable, shown, unitless=True)
    for variable in env if prefix and findings.unknown != "ignore" else ():
        name = variable.removeprefix(prefix)
        if name != variable and variable not in known and _SERVICE_LINK.search(name) is None:
            findings.stranger(variable, name.lower(), names, prefix)
    return found


def directory(
    path: Path, names: Mapping[str, Option], yaml_name: str | None, findings: Findings
) -> tuple[Layer, Layer]:
    """What a config-dir says: in its YAML file, if it may have one, and in its files for one setting each.

    A mounted ConfigMap is swapped as a whole, by a link named ``..data`` that all others lead through (see
    Kubernetes, "Projected volumes"): what is read is of one generation. One that never rests is a fault.
    """
    for _ in range(_TRIES):
        generation, seen = _generation(path), Findings(unknown=findings.unknown)
        many: Layer = {}
        if yaml_name is not None:
            inside = path / generation  # a new key's own link comes after the swap
            place = inside if (inside / yaml_name).exists() else path
            many = yaml_file(path / yaml_name, names, seen, place=place)
        found = _files(path, generation, names, seen, yaml_name)
        if _generation(path) == generation:
            findings.faults += seen.faults
            findings.warnings += seen.warnings
            return many, found
    findings.fault(f"{CONFIG_DIR} {path}: it changed whenever it was read; leave it alone and start again")
    return {}, {}


def _generation(path: Path) -> str:
    """What ``..data`` leads to; empty without such a link, where nothing is swapped as a whole."""
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
        text = (error.strerror or str(error)).lower()
        findings.fault(f"{CONFIG_DIR} {path}: {text}; expected a directory")
        return {}
    if generation:
        entries = _swapped(path, entries, names, unknown=findings.unknown != "ignore")
    found: Layer = {}
    for entry, place in sorted(entries.items()):
        name, shown_path = entry.lower(), path / entry
        if name not in names:
            hidden = entry.startswith(".") or entry.endswith("~")  # a mounted ConfigMap's own, an editor's
            if not hidden and entry != yaml_name and findings.unknown != "ignore" and shown_path.is_file():
                findings.stranger(f"file {shown_path}", name, names)
            continue
        try:
            text = read_regular(place / entry).decode().strip()
        except IsADirectoryError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            findings.warnings.append(f"{shown_path}: cannot be read and is skipped: {_reason(error)}")
            continue
        shown = f"{shown_path}: {HIDDEN if _hides(name, names[name]) else _quoted(text)}"
        found[name] = Given(text, name, f"file {shown_path}", shown, unitless=True)
    return found


def _swapped(
    path: Path, entries: Iterable[str], names: Mapping[str, Option], *, unknown: bool
) -> dict[str, Path]:
    """Where to read each entry: those that lead through ``..data`` there, as it has them now.

    A key's own link comes after the swap that brings the key, and goes after the one that takes it away.
    """
    data = path / _DATA
    try:
        present = os.listdir(data)  # noqa: PTH208
    except OSError:  # it is being removed: the next try finds its successor
        present = []
    found = dict.fromkeys(present, data)
    for entry in entries:
        if entry not in found and (entry.lower() in names or unknown) and not _leads_through(path / entry):
            found[entry] = path
    return found


def _leads_through(path: Path) -> bool:
    try:
        return os.readlink(path).partition("/")[0] == _DATA  # noqa: PTH115
    except FileNotFoundError:
        return True  # gone by now: it was the link of a key that the swap has taken away
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
    """A file with a YAML mapping of settings, of which options know some; nothing when there is none.

    It may be read in another place than users know it by. One that a flag names has to be there.
    """
    try:
        text = read_regular((place or path.parent) / path.name).decode()
    except (OSError, UnicodeDecodeError) as error:
        if flag:
            findings.fault(f"{flag} {path}: {_reason(error).lower()}; expected a YAML file of settings")
        elif not isinstance(error, FileNotFoundError | IsADirectoryError):
            findings.warnings.append(f"{path}: cannot be read and is skipped: {_reason(error)}")
        return {}
    found: Layer = {}
    for key, value in _mapping(path, text, findings).items():
        if (option := names.get(name := str(key).lower())) is None:
            findings.stranger(f"{path}: {name}", name, names)
            continue
        shown = f"{path}: {name}: {HIDDEN if _hides(name, option) else _quoted(value)}"
        if isinstance(value, list) and not all(isinstance(part, str) for part in value):
            findings.fault(f"{shown}: expected a list of texts")
            continue
        found[name] = Given(value, name, f"file {path}", shown, unitless=True)
    return found


def _mapping(path: Path, text: str, findings: Findings) -> Mapping[object, object]:
    """What the text of a YAML file of settings says; empty, with a fault, when it is none."""
    import yaml  # few have such a file

    try:
        data = yaml.load(text, yaml.BaseLoader)  # noqa: S506  # it makes texts, lists and mappings only
    except (yaml.YAMLError, RecursionError) as error:
        where = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        findings.fault(f"{path}{where}: this is no YAML; expected a mapping of settings to values")
        return {}
    if (kind := _no_settings(data)) is not None:
        if data:
            findings.fault(f"{path}: {kind}expected a mapping of settings to values")
        return {}
    for name, line in _repeated(yaml.compose(text, yaml.BaseLoader)):
        findings.fault(f"{path}, line {line}: {name} is there twice; expected each setting once")
    given: Mapping[object, object] = data
    return given


def _repeated(mapping: "Node | None") -> Iterator[tuple[str, int]]:
    """Each key that a YAML mapping holds once more, with its line; loading it would keep the last value."""
    seen: set[str] = set()
    for key, _ in mapping.value if mapping else ():
        name = str(key.value).lower()
        if name in seen:
            yield name, key.start_mark.line + 1
        seen.add(name)


def _no_settings(data: object) -> str | None:
    """What a file holds instead of settings, as the beginning of an error; None for a mapping."""
    if not isinstance(data, dict):
        return ""
    return "this is a Kubernetes object; " if {"apiVersion", "kind"} <= data.keys() else None


def code(settings: Mapping[str, object], names: Mapping[str, Option], findings: Findings) -> Layer:
    """Values given in code, by the names of options."""
    found: Layer = {}
    for name, value in settings.items():
        if (option := names.get(name)) is None:
            findings.fault(_unknown(name, name, names))
        else:
            shown = f"{name}={HIDDEN if _hides(name, option) else repr(value)}"
            found[name] = Given(value, name, "code", shown)
    return found


def settled(layer: Layer, options: Iterable[Option], findings: Findings) -> Layer:
    """What the place gave, by option: an old name counts only where the new one is absent."""
    found: Layer = {}
    for option in options:
        given = [layer[name] for name in option.names if name in layer]
        if len(given) > 1 and given[1].name == option.file_name:
            findings.fault(f"{given[0].shown} and {given[1].shown}: give one of them")
        if given:
            found[option.name] = given[0]
    return found


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is no UTF-8 text"


def _hides(name: str, option: Option | None) -> bool:
    """Whether what is given under that name must not be shown; the path of a secret's file may be."""
    return option is not None and option.secret and name != option.file_name


def _masked(text: str, name: str, option: Option | None) -> str:
    if _hides(name, option):
        return HIDDEN
    return text if text.isprintable() and len(text) <= _SHOWN else _quoted(text)


def _quoted(value: object) -> str:
    """A value as Python writes it, or its beginning: a file may hold a megabyte, or lists of lists."""
    if not isinstance(value, str):
        return _brief.repr(value)
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"


def _stray(word: str, names: Mapping[str, Option]) -> str:
    """Without its value, which might be a secret."""
    shown = word.partition("=")[0] or word
    name = shown.lstrip("-").lower()
    hint = f"; did you mean --{name}?" if name in names else ""
    return f"{shown}: not expected here; settings are --name=value{hint}"


def _unknown(shown: str, name: str, names: Mapping[str, Option], prefix: str = "") -> str:
    current = (known for known, option in names.items() if known not in option.formerly)
    near = _nearest(name.replace("_", "-"), tuple(current))
    if near and prefix != "--" and prefix:
        near = env_name(near, "")
    hint = f"; did you mean {prefix}{near}?" if near else ""
    return f"{shown}: no such setting{hint}"


@functools.cache
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    import difflib  # only mistakes need it

    found = difflib.get_close_matches(name, (*names, CONFIG_DIR), 1)
    return found[0] if found else None
