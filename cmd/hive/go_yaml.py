"""YAML as Cilium's clients print it, which is Go's yaml.v3 over the structs of its API.

In: a decoded answer, and its model if it has one: ``cells.api.models.node:ServiceModel``. Out: keys in
lower case without dashes, every field of a model, the absent ones as null, empty or zero.

Source: gopkg.in/yaml.v3 (encode.go, emitterc.go, resolve.go); go-swagger's structs with sorted fields.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_INDENT: Final = 4
_OWN: Final = frozenset({"since", "session-error", "isolated-since", "speaker-crashes"})
"""Fields of our models that Cilium's have not got."""
_OLD_BOOLS: Final = frozenset(
    each for word in ("y", "yes", "on", "n", "no", "off") for each in (word, word.title(), word.upper())
)
_OTHER_TYPES: Final = re.compile(
    r"""
    (~|null|Null|NULL|true|True|TRUE|false|False|FALSE|<<)?
    | [-+]?(\.inf|\.Inf|\.INF) | \.nan | \.NaN | \.NAN
    | [-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)
    | [-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?
    | [-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?
    | [0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ][0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}(\.[0-9]+)?([Zz]|[-+][0-9:]+)?)?
    """,
    re.VERBOSE,
)
"""Plain texts that YAML reads as something else than a text."""


def yaml_text(value: Any, model: str = "") -> str:
    """``value`` as YAML, with ``model`` (``module:Class``; of a list, ``[module:Class]``) as that model."""
    if model:
        module, _, name = model.strip("[]").partition(":")
        kind: Any = getattr(import_module(module), name)
        value = _filled(value, list[kind] if model.startswith("[") else kind)
    return "\n".join(_block(value, 0)) + "\n"


def _filled(value: Any, kind: Any) -> Any:
    """A decoded answer as Go's struct of that type has it."""
    kind = _plain(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not isinstance(value, Mapping):
            return None
        hints = get_type_hints(kind, include_extras=True)
        names = {one.encode_name: hints[one.name] for one in msgspec.structs.fields(kind)}
        keys = sorted((names.keys() - _OWN) | value.keys())
        return {
            re.sub(r"[^a-z0-9]", "", key.lower()): _filled(value.get(key), names.get(key, Any))
            for key in keys
        }
    origin = get_origin(kind) or kind
    if origin in {list, tuple}:
        inner = next(iter(get_args(kind)), Any)
        return [_filled(one, inner) for one in value or ()]
    if origin in {dict, Mapping}:
        inner = (*get_args(kind), Any, Any)[1]
        return {key: _filled(one, inner) for key, one in sorted((value or {}).items())}
    if value is None and isinstance(kind, type) and kind in {str, int, bool, float}:
        return kind()
    return value


def _plain(kind: Any) -> Any:
    """A type without what is written around it: Annotated, None and UNSET beside it, its literals."""
    while True:
        origin = get_origin(kind)
        if origin is Annotated:
            kind = get_args(kind)[0]
        elif origin in {Union, UnionType}:
            others = [one for one in get_args(kind) if one not in {type(None), msgspec.UnsetType}]
            if len(others) != 1:
                return Any
            kind = others[0]
        elif origin is Literal:
            return type(get_args(kind)[0])
        else:
            return kind


def _block(value: Any, indent: int) -> Iterator[str]:
    """The lines of a value: those of a list or an object that is not empty are indented."""
    space = " " * indent
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _entry(f"{space}{_scalar(key, indent)}:", one, _deeper(indent))
    elif isinstance(value, list) and value:
        for one in value:
            if isinstance(one, Mapping | list) and one:
                first, *others = _block(one, indent + 2)
                yield f"{space}- {first[indent + 2 :]}"
                yield from others
            else:
                yield f"{space}- {_scalar(one, indent)}"
    else:
        yield space + _scalar(value, indent)


def _entry(head: str, value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, Mapping | list) and value:
        yield head
        yield from _block(value, indent)
    else:
        yield f"{head} {_scalar(value, indent)}"


def _deeper(indent: int) -> int:
    """The indentation of what an entry of an object contains: the next multiple of four."""
    return _INDENT * ((indent + _INDENT) // _INDENT)


def _scalar(value: Any, indent: int) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list):
        return "[]" if isinstance(value, list) else "{}"
    if not isinstance(value, str):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if "\n" in value:
        return _literal(value, indent)
    quoted = value in _OLD_BOOLS or _OTHER_TYPES.fullmatch(value) is not None
    return _one_line(value, '"' if quoted else None)


def _literal(text: str, indent: int) -> str:
    chomping = "" if text.endswith("\n") else "-"
    lines = text.removesuffix("\n").split("\n")
    return f"|{chomping}\n" + "\n".join(f"{' ' * indent}{line}" if line else "" for line in lines)


def _one_line(text: str, style: str | None) -> str:
    import yaml  # 25 ms that other forms do not need

    shown = yaml.safe_dump(text, default_style=style, allow_unicode=True, width=float("inf"))
    return str(shown).removesuffix("\n").removesuffix("\n...")
