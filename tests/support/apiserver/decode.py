"""Bodies into objects: JSON and YAML, typed as Go would, without what nobody declared.

Gives: parse, Decoded, decode.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any, NamedTuple

import yaml

from tests.support.apiserver.errors import Obj, bad_request
from tests.support.apiserver.types import Type

_GO = {"dict": "object", "list": "array", "str": "string", "int": "number", "float": "number", "bool": "bool"}
_WANTED = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
_OMITTED_FALSE = frozenset(
    {
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "unschedulable",
        "readOnly",
        "stdin",
        "stdinOnce",
        "tty",
        "publishNotReadyAddresses",
        "preserveUnknownFields",
        "deprecated",
        "disabled",
    }
)
_OMITTED_ZERO = frozenset({"hostPort", "nodePort", "healthCheckNodePort", "initialDelaySeconds", "priority_"})
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)")
_POINTERS = frozenset({"holderIdentity", "storageClassName", "ingressClassName", "appProtocol"})
"""Texts that are kept when they are empty."""


class GoJSONError(ValueError):
    """JSON that cannot be read, in the words of Go's decoder."""


def loads(body: bytes) -> Any:
    """JSON. Raises GoJSONError."""
    try:
        return json.loads(body.decode("utf-8", "replace"))
    except json.JSONDecodeError:
        pass
    text = body.decode("latin-1")  # the decoder tells of bytes
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GoJSONError(_go_error(text, error)) from error


def _go_error(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos :]
    if not rest.strip():
        return "unexpected end of JSON input"
    if error.msg.startswith("Extra data"):
        return f"invalid character {_char(rest)} after top-level value"
    if error.msg.startswith("Expecting property name"):
        return f"invalid character {_char(rest)} looking for beginning of object key string"
    for word in ("null", "true", "false"):
        if rest[0] == word[0]:
            at = next((n for n, c in enumerate(word) if rest[n : n + 1] != c), 1)
            return f"invalid character {_char(rest[at:])} in literal {word} (expecting '{word[at]}')"
    return f"invalid character {_char(rest)} looking for beginning of value"


def _char(text: str) -> str:
    if text and (ord(text[0]) < 0x20 or ord(text[0]) >= 0x7F):
        return f"'\\u{ord(text[0]):04x}'"
    return repr(text[0]) if text else "''"


def load_yaml(body: bytes) -> Any:
    """YAML 1.1, or JSON, which is YAML too. Raises StatusError 400."""
    try:
        return yaml.load(body, Loader=_Loader)  # noqa: S506  # a SafeLoader with one resolver less
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = max(1, mark.line) if mark else 1
        problem = getattr(error, "problem", None) or str(error)
        raise bad_request(
            f"error decoding YAML: error converting YAML to JSON: yaml: line {line}: {problem}"
        ) from error


class _Loader(yaml.CSafeLoader):
    """Times stay text, and the one-letter booleans of YAML 1.1 are booleans."""


_Loader.yaml_implicit_resolvers = {
    key: [one for one in found if one[0] != "tag:yaml.org,2002:timestamp"]
    for key, found in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$"), list("yYnN"))


def _construct_bool(loader: Any, node: Any) -> bool:
    return str(loader.construct_scalar(node)).lower() in {"y", "yes", "true", "on"}


_Loader.add_constructor("tag:yaml.org,2002:bool", _construct_bool)


class Decoded(NamedTuple):
    """An object, and the fields that were dropped from it."""

    obj: Obj
    unknown: list[str]


class _MismatchError(Exception):
    pass


def decode(value: Obj, kind: Type, name: str, version: str) -> Decoded:
    """Typed as a built-in kind. Raises StatusError 400."""
    unknown: list[str] = []
    try:
        made = _decoded(value, kind, "", name, unknown)
    except _MismatchError as error:
        raise bad_request(f'{name} in version "{version}" cannot be handled as a {name}: {error}') from error
    return Decoded(made if isinstance(made, dict) else {}, unknown)


def _decoded(value: Any, kind: Type, at: str, struct: str, unknown: list[str]) -> Any:
    if value is None:
        return None
    if kind.name == "object" or kind.is_struct:
        if not isinstance(value, dict):
            raise _mismatch(value, at, struct, "map[string]string" if kind.additional else "v1." + struct)
        return _decoded_object(value, kind, at, struct, unknown)
    if kind.name == "array":
        if not isinstance(value, list):
            raise _mismatch(value, at, struct, "[]")
        of = kind.items
        if of is None:
            return value
        return [_decoded(one, of, f"{at}[{n}]", struct, unknown) for n, one in enumerate(value)]
    return _decoded_scalar(value, kind, at, struct)


def _decoded_scalar(value: Any, kind: Type, at: str, struct: str) -> Any:
    wanted = _WANTED.get(kind.name)
    if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        if (
            kind.name == "string"
            and isinstance(value, (int, float))
            and "Quantity" in str(kind.schema.get("description", ""))[:60]
        ):
            return str(value)
        if not (kind.name == "string" and "oneOf" in kind.schema):
            raise _mismatch(
                value, at, struct, {"integer": "int32", "boolean": "bool"}.get(kind.name, kind.name)
            )
    if kind.schema.get("format") == "date-time" and value:
        return _moment(str(value), micro=str(kind.schema.get("$name", "")).endswith("MicroTime"))
    return value


def _moment(text: str, *, micro: bool) -> str:
    """A time as it is stored. Raises _MismatchError."""
    layout = "2006-01-02T15:04:05.000000Z07:00" if micro else "2006-01-02T15:04:05Z07:00"
    found = _TIME.fullmatch(text)
    rest, wanted = text, "2006"
    if found is not None:
        fraction = found[2] or ""
        if not micro or len(fraction) == 7:
            then = datetime.fromisoformat(text.replace("Z", "+00:00")[:19] + found[3].replace("Z", "+00:00"))
            return then.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") + (fraction if micro else "") + "Z"
        rest, wanted = (fraction[7:] + found[3], "Z07:00") if fraction else (found[3], ".000000")
    raise _MismatchError(f'parsing time "{text}" as "{layout}": cannot parse "{rest}" as "{wanted}"')


def _mismatch(value: Any, at: str, struct: str, wanted: str) -> _MismatchError:
    path = re.sub(r"\[\d+\]", "", at)
    return _MismatchError(
        f"json: cannot unmarshal {_GO[type(value).__name__]} into Go struct field {struct}.{path} of type {wanted}"
    )


def _decoded_object(value: Obj, kind: Type, at: str, struct: str, unknown: list[str]) -> Obj:
    made: Obj = {}
    for name, one in value.items():
        path = f"{at}.{name}" if at else name
        if kind.is_struct and name not in kind.properties:
            unknown.append(path)
            continue
        of = kind.field(name)
        found = _decoded(one, of, path, struct, unknown)
        if kind.is_struct and _omitted(name, found, of, kind):
            continue
        if found is None and not kind.is_struct:
            found = ""
        made[name] = found
    return made


def _omitted(name: str, value: Any, of: Type, parent: Type) -> bool:
    if value is None:
        return name not in parent.required or name == "metadata"
    if value is False:
        return name in _OMITTED_FALSE
    if value == 0:
        return name in _OMITTED_ZERO
    if name in parent.required:
        return False
    if value == "":
        return name not in _POINTERS
    return (value == [] and of.name == "array") or (value == {} and of.additional is not None)
