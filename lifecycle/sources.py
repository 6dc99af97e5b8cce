"""Where settings come from: flags, then environment, then config-dir, then defaults.

Needs:  the options of the structs.
Gives:  Sources, and load(): every struct filled, the origin of each value, and every error at once.

A config-dir holds one file per option (a mounted ConfigMap). Keys there and variables that no option knows
are other programs' business and accepted silently; an unknown flag is a mistake.
"""

import functools
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from lifecycle import values
from lifecycle.durations import Duration
from lifecycle.errors import Fault
from lifecycle.settings import ENV_PREFIX, Option, Settings, options_of

__all__ = ["Loaded", "Setting", "Sources", "load"]

CONFIG_DIR = "config-dir"


class Setting(msgspec.Struct, frozen=True):
    """One option with its value and where that came from."""

    option: Option
    value: object
    origin: str
    """In words: ``flag --mtu``, ``CILIUM_MTU``, ``file /etc/hive/mtu``, ``default``, ``code``."""


class Loaded(msgspec.Struct):
    """What the sources gave."""

    structs: dict[type[Settings], Settings] = msgspec.field(default_factory=dict)
    settings: list[Setting] = msgspec.field(default_factory=list)
    faults: list[Fault] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)


class Sources:
    """The outside places of settings. The config-dir itself may come as flag or environment variable."""

    def __init__(
        self,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        config_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.argv = tuple(argv)
        """Flags only: ``--name=value``, ``--name value``, ``--name`` for a boolean."""
        self.env = dict(env or {})
        self.config_dir = Path(config_dir) if config_dir is not None else None


class _Given(msgspec.Struct, frozen=True):
    """A value as some place gave it, not yet read."""

    raw: object
    place: str
    """For origins."""
    shown: str
    """For errors: place and value as the user wrote them."""
    unitless: bool = False
    """Whether a bare whole number is a duration in nanoseconds, as Cilium reads files and variables."""


def load(structs: Iterable[type[Settings]], source: Sources | Mapping[str, object] | None) -> Loaded:
    """Fill the structs. Nothing is raised: faults are in the result; a struct at fault is missing from it."""
    loaded = Loaded()
    structs = tuple(structs)
    options = {option.name: option for struct in structs for option in options_of(struct)}
    given = _given(options, source, loaded)
    for struct in structs:
        _fill(struct, given, loaded)
    return loaded


def _fill(struct: type[Settings], given: Mapping[str, _Given], loaded: Loaded) -> None:
    fields: dict[str, object] = {}
    faults = len(loaded.faults)
    for option in options_of(struct):
        if (found := given.get(option.name)) is None:
            if option.required:
                text = f"{option.name} is required: give --{option.name}, {option.env} or its config-dir file"
                loaded.faults.append(Fault("setting", text))
                continue
            value, origin = option.default, "default"
        else:
            try:
                value, origin = _read(found, option, loaded), found.place
            except ValueError as error:
                loaded.faults.append(Fault("setting", f"{found.shown}: {error}"))
                continue
        fields[option.field] = value
        loaded.settings.append(Setting(option, value, origin))
    if len(loaded.faults) > faults:
        return
    filled = struct(**fields)
    try:
        filled.validate()
    except ValueError as error:
        loaded.faults.append(Fault("setting", _placed(str(error), fields, options_of(struct), given)))
    else:
        loaded.structs[struct] = filled


def _placed(
    text: str, fields: Mapping[str, object], options: Iterable[Option], given: Mapping[str, _Given]
) -> str:
    """What validate() says of ``name=value``, said of the place the value came from."""
    for option in options:
        said = f"{option.name}={values.show(fields[option.field])}"
        found = given.get(option.name)
        if found is not None and found.place != "code" and text.startswith(said):
            return found.shown + text.removeprefix(said)
    return text


def _read(found: _Given, option: Option, loaded: Loaded) -> object:
    raw = found.raw
    if isinstance(raw, str) and found.unitless and option.kind is Duration and raw.lstrip("+-").isdecimal():
        if int(raw):
            loaded.warnings.append(f"{found.shown}: a duration without a unit is read as nanoseconds")
        raw = f"{raw}ns"
    if isinstance(raw, list) and all(isinstance(part, str) for part in raw):  # a flag given several times
        raw = ",".join(raw)
    return values.parse(raw, option.kind) if isinstance(raw, str) else values.accept(raw, option.kind)


def _given(
    options: Mapping[str, Option], source: Sources | Mapping[str, object] | None, loaded: Loaded
) -> dict[str, _Given]:
    if source is None:
        return {}
    if not isinstance(source, Sources):
        unknown = [name for name in source if name not in options]
        loaded.faults.extend(_unknown(name, name, options) for name in unknown)
        return {name: _Given(value, "code", f"{name}={value!r}") for name, value in source.items()}
    flags = _flags(source.argv, options, loaded)
    env = {name.upper(): text for name, text in source.env.items() if text}
    directory = source.config_dir
    if (flag := flags.pop(CONFIG_DIR, None)) is not None:
        directory = Path(str(flag.raw))
    elif directory is None and (named := env.get(f"{ENV_PREFIX}CONFIG_DIR")):
        directory = Path(named)
    given = _files(directory, options, loaded) if directory is not None else {}
    for name, option in options.items():
        if (text := env.get(option.env)) is not None:
            given[name] = _Given(text, option.env, f"{option.env}={text}", unitless=True)
    return given | flags


def _flags(argv: Sequence[str], options: Mapping[str, Option], loaded: Loaded) -> dict[str, _Given]:
    flags: dict[str, _Given] = {}
    words = deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("--") or word == "--":
            loaded.faults.append(Fault("setting", f"{word}: not expected here; settings are --name=value"))
            continue
        name, equals, text = word[2:].partition("=")
        name = name.lower()
        option = options.get(name)
        if option is None and name != CONFIG_DIR:
            loaded.faults.append(_unknown(f"--{name}", name, options, "--"))
            if not equals and words and not words[0].startswith("--"):
                words.popleft()  # its value is no mistake of its own
            continue
        if not equals and option is not None and option.kind is bool:
            text = "true"
        elif not equals:
            if not words:
                loaded.faults.append(Fault("setting", f"--{name}: needs a value, as in --{name}=VALUE"))
                continue
            text = words.popleft()
        raw: object = text
        if option is not None and values.is_list(option.kind):
            before = flags[name].raw if name in flags else []
            raw = [*before, text]  # type: ignore[misc]  # lists are only ever put here as lists
        flags[name] = _Given(raw, f"flag --{name}", f"--{name}={text}")
    return flags


def _files(directory: Path, options: Mapping[str, Option], loaded: Loaded) -> dict[str, _Given]:
    """The files of a config-dir that options know; others and directories (``..data``) are left alone."""
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208  # names only: half the time of iterdir
    except OSError as error:
        text = f"{CONFIG_DIR} {directory}: {(error.strerror or str(error)).lower()}; expected a directory"
        loaded.faults.append(Fault("setting", text))
        return {}
    given: dict[str, _Given] = {}
    for name in names:
        option = options.get(name.lower())
        if option is None:
            continue
        path = directory / name
        try:
            text = path.read_text(encoding="utf-8").strip()
        except IsADirectoryError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            loaded.warnings.append(f"{path}: cannot be read and is skipped: {error}")
            continue
        given[option.name] = _Given(text, f"file {path}", f"{path}: {text!r}", unitless=True)
    return given


def _unknown(shown: str, name: str, options: Mapping[str, Option], prefix: str = "") -> Fault:
    near = _nearest(name, tuple(options))
    hint = f"; did you mean {prefix}{near}?" if near else ""
    return Fault("setting", f"{shown}: no such setting{hint}")


@functools.cache
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    import difflib  # only mistakes need it

    found = difflib.get_close_matches(name, (*names, CONFIG_DIR), 1)
    return found[0] if found else None
