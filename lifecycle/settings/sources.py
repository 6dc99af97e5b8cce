"""The sources of settings, by precedence: flags, environment, YAML file, config-dir, defaults.

A config-dir contains one file for each option (a mounted ConfigMap), and may contain a YAML file with
several. A flag may name a separate YAML file, which precedes the config-dir.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from lifecycle.errors import Fault, leaves
from lifecycle.hints import place_of, type_name
from lifecycle.settings import files, layers, values
from lifecycle.settings.durations import Duration
from lifecycle.settings.options import CONFIG_DIR, Group, Option, Settings, env_name
from lifecycle.settings.raw_values import Findings, Layer, RawValue, Unknown

__all__ = ["UNSET", "Loaded", "Setting", "Sources", "load"]

UNSET = "unset"
"""The origin of a required setting without a value."""


class Setting(msgspec.Struct, frozen=True):
    """One option with its value and origin."""

    option: Option
    value: object
    origin: str
    """As text: ``flag --mtu``, ``HIVE_MTU``, ``file /etc/hive/mtu``, ``default``, ``code``, ``unset``."""

    @property
    def text(self) -> str:
        """The value as text; never a secret's."""
        return values.show(self.value)


class Loaded(Findings):
    """The result of reading the sources."""

    filled: dict[Group, Settings] = msgspec.field(default_factory=dict)
    settings: list[Setting] = msgspec.field(default_factory=list)
    unset: list[Option] = msgspec.field(default_factory=list)
    """Required options without a value."""
    unset_faults: list[Fault] = msgspec.field(default_factory=list)
    """The faults that report them, which are also in `faults`."""
    config_dir: Path | None = None
    """The config-dir that was read, if any."""
    config_file: Path | None = None
    """The YAML file that was named and read, if any."""

    @property
    def structs(self) -> dict[type[Settings], Settings]:
        """Structs with options that take no prefix, by type."""
        return {group.struct: filled for group, filled in self.filled.items() if not group.prefix}


class Sources:
    """The external sources of settings. A flag or environment variable may name the config-dir."""

    def __init__(
        self,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        config_dir: str | os.PathLike[str] | None = None,
        prefix: str | None = None,
        yaml_name: str | None = None,
        file_flag: str | None = None,
        unknown: Unknown = "warn",
        others: Iterable[str] = (),
    ) -> None:
        self.argv = tuple(argv)
        """Flags only: ``--name=value``, ``--name value``, ``--name`` for a boolean."""
        self.env = dict(env or {})
        self.config_dir = Path(config_dir) if config_dir is not None else None
        self.prefix = prefix
        """The prefix of environment variables, in upper case; None lets the hive choose."""
        self.yaml_name = yaml_name
        """Name of the file in the config-dir that may contain several settings; files for one option precede
        it.
        """
        self.file_flag = file_flag
        """The flag, also as a variable, that may name a YAML file of settings, which precedes the config-dir.
        """
        self.unknown: Unknown = unknown
        """Treatment of keys of files, and of variables with the prefix, without an option: logged with the
        nearest names (warn), refused, or ignored, if other programs have settings in the same place. An
        unknown flag is always refused.
        """
        self.others = frozenset(others)
        """Keys of other programs in the same place, in kebab-case, which are ignored."""

    def with_input(
        self, argv: Sequence[str], env: Mapping[str, str], unknown: Unknown | None = None
    ) -> "Sources":
        """These sources with the flags and variables of a process."""
        return Sources(
            argv,
            env,
            self.config_dir,
            self.prefix,
            self.yaml_name,
            self.file_flag,
            self.unknown if unknown is None else unknown,
            self.others,
        )


def load(
    structs: Iterable[type[Settings] | Group],
    source: Sources | Mapping[str, object] | None,
    config_dirs: Sequence[Path] = (),
    prefix: str = "HIVE_",
    *,
    part: bool = False,
) -> Loaded:
    """Fill the structs. Raises nothing: the result contains the faults, and no structs with faults.

    `config_dirs`, if any, replace the sources' own; the last has precedence. `prefix` is that of environment
    variables, unless the sources have one. With `part`, more structs exist, and flags and keys that these do
    not know are ignored.
    """
    loaded = Loaded(part=part)
    groups = [struct if isinstance(struct, Group) else Group(struct) for struct in structs]
    if isinstance(source, Sources) and source.prefix is not None:
        prefix = source.prefix
    options = [option for group in groups for option in group.options]
    raw_values = _gathered(options, source, loaded, config_dirs, prefix)
    for group in groups:
        _fill(group, raw_values, prefix, loaded)
    return loaded


def _gathered(
    options: Sequence[Option],
    source: Sources | Mapping[str, object] | None,
    findings: Loaded,
    config_dirs: Sequence[Path],
    prefix: str,
) -> Layer:
    """Return the value of each option, from the source with the highest precedence."""
    if source is None:
        return {}
    names = layers.by_name(options)
    if not isinstance(source, Sources):
        return layers.by_option(layers.code(source, names, findings), options, findings)
    findings.unknown = "ignore" if findings.part else source.unknown
    findings.others = source.others
    place_names = (CONFIG_DIR, source.file_flag) if source.file_flag else (CONFIG_DIR,)
    flags = layers.flags(source.argv, names, findings, place_names)
    env = {name.upper(): text for name, text in source.env.items() if text}
    directory = _place(CONFIG_DIR, flags, env, prefix, source.config_dir)
    places = [layers.environment(env, prefix, names, findings, place_names), flags]
    findings.config_dir = directory
    if source.file_flag and (file := _place(source.file_flag, flags, env, prefix)) is not None:
        findings.config_file = file
        places.insert(0, files.yaml_file(file, names, findings, flag=f"--{source.file_flag}"))
        if directory is not None:
            findings.warnings.append(
                f"--{source.file_flag} {file} and --{CONFIG_DIR} {directory} are both given: where both"
                " have a setting, the file's value counts"
            )
    for path in reversed(config_dirs or ([] if directory is None else [directory])):
        places[:0] = files.directory(path, names, source.yaml_name, findings)
    raw_values: Layer = {}
    for layer in places:
        raw_values |= layers.by_option(layer, options, findings)
    return raw_values


def _place(
    name: str, flags: Layer, env: Mapping[str, str], prefix: str, otherwise: Path | None = None
) -> Path | None:
    """Return the path in a flag (removed from `flags`) or variable; None if there is none or it is empty."""
    if (flag := flags.pop(name, None)) is not None:
        return Path(str(flag.raw)) if flag.raw else None
    if otherwise is None and (named := env.get(env_name(name, prefix))):
        return Path(named)
    return otherwise


def _fill(group: Group, raw_values: Layer, prefix: str, loaded: Loaded) -> None:
    settings: list[Setting] = []
    faults = len(loaded.faults)
    for option in group.options:
        if (raw_value := raw_values.get(option.name)) is not None:
            try:
                value = _read(raw_value, option, loaded)
                option.limits.check(value)
                settings.append(Setting(option, value, raw_value.place))
            except ValueError as error:
                loaded.fault(f"{raw_value.shown}: {error}")
        elif option.required:
            ways = f"--{option.name}, {env_name(option.name, prefix)} or its config-dir file"
            loaded.fault(f"{option.name} is required: give {ways}")
            loaded.unset.append(option)
            loaded.unset_faults.append(loaded.faults[-1])
            settings.append(Setting(option, None, UNSET))
        else:
            settings.append(Setting(option, option.default, "default"))
    loaded.settings += settings
    if len(loaded.faults) > faults:
        return
    filled = group.struct(**{setting.option.field: setting.value for setting in settings})
    loaded.faults += [Fault("setting", text) for text in _invalid(filled, settings, raw_values)]
    if len(loaded.faults) == faults:
        loaded.filled[group] = filled


def _invalid(filled: Settings, settings: Sequence[Setting], raw_values: Layer) -> list[str]:
    """Return the faults of its values, and those of a faults() that fails."""
    faults = []
    try:
        filled.validate()
    except* ValueError as errors:
        faults += [_placed(str(leaf), settings, raw_values) for leaf in leaves(errors)]
    except* Exception as errors:  # noqa: BLE001  # a mistake in the struct, reported with its place
        source = f"{type_name(type(filled))}.faults at {place_of(type(filled).faults)}"
        faults += [f"{source}: {type(leaf).__name__}: {leaf}" for leaf in leaves(errors)]
    return faults


def _read(raw_value: RawValue, option: Option, findings: Findings) -> object:
    if raw_value.name in option.renamed_from:
        findings.warnings.append(f"{raw_value.shown}: this setting is called {option.name} now; rename it")
    if raw_value.name == option.file_name:
        return values.parse(_text_of_file(str(raw_value.raw)), option.kind)
    raw = raw_value.raw
    if not isinstance(raw, str):
        if raw_value.place != "code" and isinstance(raw, list):  # list of texts: a flag that may be repeated
            return values.parse_all(raw, option.kind)
        return values.accept(raw, option.kind)
    if raw_value.unitless and values.bare(option.kind)[0] is Duration and raw.lstrip("+-").isdecimal():
        if raw.strip("+-0"):
            findings.warnings.append(f"{raw_value.shown}: a duration without a unit is read as nanoseconds")
        raw = f"{raw}ns"
    return values.parse(raw, option.kind)


def _text_of_file(path: str) -> str:
    """Return the contents of a file, without the line end that editors add.

    Raises ValueError if it cannot be read or is empty, as a file that is named must hold a value.
    """
    expected = "expected a file that holds the value"
    if not path:
        raise ValueError(expected)
    try:
        if not (text := Path(path).read_text(encoding="utf-8").rstrip("\r\n")):
            raise ValueError(f"it is empty; {expected}")
    except UnicodeDecodeError:
        raise ValueError(f"it is not UTF-8 text; {expected}") from None
    except OSError as error:
        raise ValueError(f"{(error.strerror or str(error)).lower()}; {expected}") from None
    return text


def _placed(text: str, settings: Iterable[Setting], raw_values: Layer) -> str:
    """Return an error of validate() about ``name=value``, with the place of that value in front."""
    for setting in settings:
        raw_value = raw_values.get(setting.option.name)
        assignment = f"{setting.option.plain_name}={values.show(setting.value)}"
        if raw_value is not None and raw_value.place != "code" and text.startswith(assignment):
            return raw_value.shown + text.removeprefix(assignment)
    prefix = next((setting.option.prefix for setting in settings), "")
    return f"{prefix}: {text}{_origins(text, settings)}" if prefix else f"{text}{_origins(text, settings)}"


def _origins(text: str, settings: Iterable[Setting]) -> str:
    """Return the origins of the values in an error, if they were set."""
    words = set(re.findall(r"[\w-]+", text))
    named = [
        setting
        for setting in settings
        if setting.option.plain_name in words and setting.origin not in {"default", "code"}
    ]
    if len(named) == 1:
        return f" (from {named[0].origin})"
    origins = "; ".join(f"{setting.option.name} from {setting.origin}" for setting in named)
    return f" ({origins})" if origins else ""
