"""Settings: frozen typed structs whose fields are options.

Needs:  values.
Gives:  Settings to derive from, and the options of a struct with their defaults and help.

    class NeighbourSettings(Settings):
        neighbour_refresh: Duration = seconds(30)
        \"\"\"How often the whole kernel table is compared.\"\"\"

is the flag ``--neighbour-refresh``, the variable ``CILIUM_NEIGHBOUR_REFRESH`` and the config-dir file
``neighbour-refresh``. A method ``validate(self)`` checks what types cannot.
"""

import functools
import inspect
import textwrap

import msgspec

from lifecycle import values

__all__ = ["ENV_PREFIX", "Option", "Settings", "options_of"]

ENV_PREFIX = "CILIUM_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Base of all structs of settings: frozen, options in kebab-case."""

    def validate(self) -> None:
        """Raise ValueError("one line") when the values do not fit each other."""


class Option(msgspec.Struct, frozen=True):
    """One field of a struct of settings."""

    name: str
    """As flag and config-dir key: ``neighbour-refresh``."""
    field: str
    kind: object
    """The type."""
    struct: type[Settings]
    required: bool

    @property
    def env(self) -> str:
        """The environment variable: ``CILIUM_NEIGHBOUR_REFRESH``."""
        return ENV_PREFIX + self.name.upper().replace("-", "_")

    @property
    def default(self) -> object:
        """The value when nothing sets it. Only for options that are not required."""
        info = _fields(self.struct)[self.field]
        return info.default_factory() if info.default is msgspec.NODEFAULT else info.default

    @property
    def type_text(self) -> str:
        """The type in a word or two."""
        return values.type_text(self.kind)

    @property
    def help(self) -> str:
        """The docstring under the field, in one line; empty without one. Reads the source when asked."""
        return _docstrings(self.struct).get(self.field, "")


@functools.cache
def options_of(struct: type[Settings]) -> tuple[Option, ...]:
    """The options of a struct, in the order of its fields."""
    return tuple(
        Option(info.encode_name, name, info.type, struct, info.required)
        for name, info in _fields(struct).items()
    )


@functools.cache
def _fields(struct: type[Settings]) -> dict[str, msgspec.structs.FieldInfo]:
    return {info.name: info for info in msgspec.structs.fields(struct)}


@functools.cache
def _docstrings(struct: type[Settings]) -> dict[str, str]:
    """The strings that follow fields in the class body, of the struct and its bases."""
    import ast  # only help needs it

    found: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if not issubclass(kind, Settings) or kind is Settings:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(kind))
        except (OSError, TypeError):
            continue  # made without source, as in a console: it has no help to show
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef)  # noqa: S101  # getsource of a class
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    found[name] = " ".join(doc.split())
    return found
