"""Settings: frozen typed structs with an option for each field.

    class NeighbourSettings(Settings):
        neighbour_refresh: Duration = seconds(30)
        \"\"\"How often the whole kernel table is compared.\"\"\"

is the flag ``--neighbour-refresh``, the variable ``HIVE_NEIGHBOUR_REFRESH`` of a hive with that name, and the
config-dir file ``neighbour-refresh``. A method ``faults(self)`` checks what types cannot.
"""

import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator

import msgspec

from lifecycle.hints.keys import type_name, unaliased
from lifecycle.settings import values
from lifecycle.settings.limits import Limits
from lifecycle.settings.secrets import Secret

__all__ = [
    "CONFIG_DIR",
    "Group",
    "Option",
    "RenamedFrom",
    "Settings",
    "env_name",
    "options_of",
    "refuse",
    "unreadable",
]

_PREFIX = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)

CONFIG_DIR = "config-dir"
"""The flag that names the directory of settings, so no option can have this name."""


def env_name(name: str, prefix: str) -> str:
    """Return the environment variable of an option: ``HIVE_NEIGHBOUR_REFRESH``."""
    return prefix + name.upper().replace("-", "_")


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Base of all settings structs: frozen, with options in kebab-case."""

    def faults(self) -> Iterable[str]:
        """Faults that types cannot express: one line each, as in ``every=0s: expected at least 1s``."""
        return ()

    def validate(self) -> None:
        """Raise a ValueError for one fault, a group of them for several.

        Raises TypeError if faults() does not return texts.
        """
        faults: object = self.faults()
        if isinstance(faults, str) or not isinstance(faults, Iterable):
            raise TypeError(f"it returned {faults!r}: expected texts, one for each fault")
        refuse(faults)


def refuse(reasons: Iterable[str]) -> None:
    """Raise a ValueError for one reason, a group of them for several; a no-op for none."""
    errors = [ValueError(reason) for reason in reasons]
    if len(errors) > 1:
        raise ExceptionGroup("settings", errors)
    for error in errors:
        raise error


class RenamedFrom:
    """The old names of an option: ``Annotated[int, RenamedFrom("old-name")]``.

    An old name still sets the option if the new one is absent, with a warning to rename it.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


class Group(msgspec.Struct, frozen=True):
    """A settings struct in a module, with the prefix of its options."""

    struct: type[Settings]
    prefix: str = ""
    """Without the dash that follows it; empty for names as in the struct."""

    @property
    def options(self) -> "tuple[Option, ...]":
        """Its options in the order of the fields."""
        return options_of(self.struct, self.prefix)


class Option(msgspec.Struct, frozen=True):
    """One field of a settings struct."""

    name: str
    """The flag and config-dir key: ``neighbour-refresh``."""
    field: str
    kind: object
    """The type."""
    struct: type[Settings]
    required: bool
    renamed_from: tuple[str, ...] = ()
    """Old names that still work."""
    prefix: str = ""
    """The prefix from config()."""
    limits: Limits = Limits()
    """Constraints of msgspec.Meta."""

    @property
    def group(self) -> Group:
        """The struct to which it belongs."""
        return Group(self.struct, self.prefix)

    @property
    def plain_name(self) -> str:
        """Its name without the prefix, as validate() of the struct uses it."""
        return self.name.removeprefix(f"{self.prefix}-") if self.prefix else self.name

    @property
    def secret(self) -> bool:
        """Whether its value must never be shown."""
        return values.is_secret(self.kind)

    @property
    def file_name(self) -> str | None:
        """The option that names a file with the value (``token-file``): only a Secret has it."""
        return f"{self.name}-file" if values.bare(self.kind)[0] is Secret else None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that set it, its own name first."""
        return (self.name, *([self.file_name] if self.file_name else []), *self.renamed_from)

    @property
    def default(self) -> object:
        """The value if nothing sets it. Only for options that are not required."""
        info = _fields(self.struct)[self.field]
        return info.default_factory() if info.default is msgspec.NODEFAULT else info.default

    @property
    def default_text(self) -> str:
        """The default as text; empty without one."""
        return "" if self.required else values.show(self.default)

    @property
    def type_text(self) -> str:
        """The type in a word or two."""
        return values.type_text(self.kind)

    @property
    def help(self) -> str:
        """The docstring below the field, in one line, and the constraints. Reads the source when called."""
        meant = next((meta.description for meta in self.limits.metas if meta.description), "")
        limits = self.limits.expects(values.bare(self.kind)[0])
        text = _docstrings(self.struct).get(self.field, meant)
        return f"{text} Expected: {limits}.".strip() if limits else text


@functools.cache
def options_of(struct: type[Settings], prefix: str = "") -> tuple[Option, ...]:
    """Return the options of a struct in the order of its fields; their names follow the prefix and a dash."""
    return tuple(_option(info, struct, prefix) for info in _fields(struct).values())


def _option(info: msgspec.structs.FieldInfo, struct: type[Settings], prefix: str) -> Option:
    kind, notes = _unannotated(info.type)
    renamed_from = tuple(name for note in notes if isinstance(note, RenamedFrom) for name in note.names)
    stem = f"{prefix}-" if prefix else ""
    old = tuple(f"{stem}{name}" for name in renamed_from)
    limits = Limits(tuple(note for note in notes if isinstance(note, msgspec.Meta)))
    return Option(f"{stem}{info.encode_name}", info.name, kind, struct, info.required, old, prefix, limits)


def _unannotated(hint: object) -> tuple[object, list[object]]:
    """Return a type and its annotations, also inside ``Annotated[...] | None``."""
    if isinstance(hint, type):  # fast path
        return hint, []
    hint = unaliased(hint)
    kind, *notes = typing.get_args(hint) if _is_annotated(hint) else (hint,)
    inner, optional = values.bare(kind)
    if optional and _is_annotated(inner):
        inner, *more = typing.get_args(inner)
        return typing.Optional[inner], [*notes, *more]  # noqa: UP045  # of a type known only now
    return kind, notes


def _is_annotated(hint: object) -> bool:
    return typing.get_origin(hint) is typing.Annotated


def unreadable(struct: object, prefix: str = "") -> Iterator[str]:
    """Why a struct cannot be filled from texts."""
    if prefix and _PREFIX.fullmatch(prefix) is None:
        yield f"prefix {prefix!r}: expected kebab-case such as inside"
        return
    if not (isinstance(struct, type) and issubclass(struct, Settings)):
        yield "it is not a Settings struct"
        return
    try:
        options = options_of(struct, prefix)
    except NameError as error:
        yield f"its type hint names {error.name}, which is not defined where it is written"
        return
    for option in options:
        if not values.known(option.kind):
            yield f"field {option.field!r}: no text can be read as {type_name(option.kind)}"
            continue
        if not option.required and (why := _default_mismatch(option)) is not None:
            yield f"field {option.field!r}: its default {option.default!r}: {why}"
        if option.limits.metas:  # fast path
            yield from _inapplicable_limits(option)
        if CONFIG_DIR in option.names:
            yield f"field {option.field!r}: {CONFIG_DIR} names the directory of settings; take another name"


def _inapplicable_limits(option: Option) -> Iterator[str]:
    for limit in option.limits.inapplicable(option.kind):
        yield f"field {option.field!r}: Meta({limit}=...) means nothing for {type_name(option.kind)}"
    if not option.required and (why := _unlimited(option)) is not None:
        yield f"field {option.field!r}: its default {option.default_text}: {why}"


def _default_mismatch(option: Option) -> str | None:
    """Why the default is not of the option's type."""
    default = option.default
    try:
        accepted = values.accept(default, option.kind)
    except ValueError as error:
        return str(error)
    is_text = isinstance(default, str) and not isinstance(accepted, str)
    return f"expected {values.expects(option.kind)}, not a text" if is_text else None


def _unlimited(option: Option) -> str | None:
    """Why the default violates the option's constraints."""
    if next(option.limits.inapplicable(option.kind), None) is None:
        try:
            option.limits.check(option.default)
        except ValueError as error:
            return str(error)
    return None


@functools.cache
def _fields(struct: type[Settings]) -> dict[str, msgspec.structs.FieldInfo]:
    return {info.name: info for info in msgspec.structs.fields(struct)}


@functools.cache
def _docstrings(struct: type[Settings]) -> dict[str, str]:
    """Return the strings that follow fields in the class body, for the struct and its bases."""
    import ast  # imported only for help

    docstrings: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if not issubclass(kind, Settings) or kind is Settings:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(kind))
        except (OSError, TypeError):
            continue  # no source, as in a console: no help
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef)  # noqa: S101  # getsource of a class
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc)))):
                    docstrings[name] = " ".join(doc.split())
    return docstrings
