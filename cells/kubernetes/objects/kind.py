"""Kinds of objects: API path, decoders, and the structs that all kinds share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, cached_property
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

__all__ = [
    "Column",
    "Condition",
    "DatedMeta",
    "Key",
    "Kind",
    "LabelSelector",
    "LabelSelectorRequirement",
    "Meta",
    "Object",
    "OwnerReference",
    "convert",
    "decode",
    "selector_of",
]


# The parts that all kinds of objects have.
#
# Source: Kubernetes API conventions, metadata; k8s.io/apimachinery/pkg/apis/meta/v1.
#
# The structs are narrow: other fields are not decoded. ``resourceVersion`` and ``managedFields`` are left
# out on purpose, so that a write that changes none of these fields changes no row.

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name."""


class ObjectPart(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """Base of all parts of objects: camel-case names, defaults are not written."""


class OwnerReference(ObjectPart, frozen=True, gc=False):
    """An owner of an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(ObjectPart, frozen=True, gc=False):
    """The fields of ``metadata`` that are read."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class DatedMeta(Meta, frozen=True, gc=False):
    """Metadata with the creation time, for kinds that need their age."""

    creation_timestamp: str = ""


class Object(ObjectPart, frozen=True, gc=False):
    """An object of any kind."""

    metadata: Meta

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return (self.metadata.namespace, self.metadata.name)

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Its namespace; empty for a cluster-scoped object."""
        return self.metadata.namespace

    @property
    def labels(self) -> dict[str, str]:
        """Its labels; do not modify them."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations; do not modify them."""
        return self.metadata.annotations or {}

    @property
    def terminating(self) -> bool:
        """Whether its deletion has started."""
        return self.metadata.deletion_timestamp is not None


class LabelSelectorRequirement(ObjectPart, frozen=True, gc=False):
    """One expression of a label selector."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None


class LabelSelector(ObjectPart, frozen=True, gc=False):
    """A label selector; an empty one selects everything. (No selector at all selects nothing.)"""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[LabelSelectorRequirement, ...] | None = None

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels match. An unknown operator matches nothing."""
        wanted = self.match_labels or {}
        if any(labels.get(key) != value for key, value in wanted.items()):
            return False
        return all(_fulfils(labels, one) for one in self.match_expressions or ())


def _fulfils(labels: Mapping[str, str], requirement: LabelSelectorRequirement) -> bool:
    value, values = labels.get(requirement.key), requirement.values or ()
    if requirement.operator == "In":
        return value is not None and value in values
    if requirement.operator == "NotIn":
        return value not in values
    if requirement.operator == "Exists":
        return value is not None
    if requirement.operator in {"gt", "lt"}:
        if value is None or not _INTEGER.fullmatch(value):
            return False
        difference = int(value) - int(values[0])
        return difference > 0 if requirement.operator == "gt" else difference < 0
    return requirement.operator == "DoesNotExist" and value is None


# Label selectors as text, in settings and annotations.
#
# Source: k8s.io/apimachinery/pkg/labels, Parse: ``a=b,c!=d,e in (f,g),h notin (i),j,!k,l>1,m<2``. The last
#         two are ``gt`` and ``lt`` as there; selectors of objects do not have them.

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/)?{_NAME}"
_REQUIREMENT: Final = re.compile(
    rf"""\s*(?:
        !\s*(?P<absent>{_KEY})
      | (?P<key>{_KEY})\s*(?:
            (?P<equality>==|=|!=)\s*(?P<value>(?:{_NAME})?)
          | (?P<order>[<>])\s*(?P<bound>{_NAME})
          | \s(?P<set>in|notin)\s*\((?P<values>[^()]*)\)
        )?
    )\s*(?:,|$)""",
    re.VERBOSE,
)
_VALUE: Final = re.compile(rf"(?:{_NAME})?")
_INTEGER: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
_MAX_LENGTH: Final = 63
"""Maximum characters of a name or a value."""


def selector_of(text: str) -> LabelSelector:
    """Parse a selector; an empty text selects everything. Raises ValueError; its message omits the text."""
    found: list[LabelSelectorRequirement] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _REQUIREMENT.match(text, at)
        if match is None or (text[match.end() - 1] == "," and match.end() == len(text)):
            raise ValueError("expected labels such as key=value,other in (a,b),!third")
        found.append(_requirement(match))
        at = match.end()
    return LabelSelector(match_expressions=tuple(found))


def _requirement(match: re.Match[str]) -> LabelSelectorRequirement:
    if (absent := match["absent"]) is not None:
        return _checked(LabelSelectorRequirement(absent, "DoesNotExist", ()))
    key: str = match["key"]
    if match["equality"] is not None:
        operator = "NotIn" if match["equality"] == "!=" else "In"
        return _checked(LabelSelectorRequirement(key, operator, (match["value"],)))
    if match["order"] is not None:
        if not _INTEGER.fullmatch(match["bound"]):
            raise ValueError(f"{key}{match['order']}{match['bound']}: expected an integer")
        operator = "gt" if match["order"] == ">" else "lt"
        return _checked(LabelSelectorRequirement(key, operator, (match["bound"],)))
    if match["set"] is not None:
        if not match["values"].strip():
            raise ValueError(f"{key} {match['set']} (): expected at least one value")
        values = tuple(one.strip() for one in match["values"].split(","))
        return _checked(LabelSelectorRequirement(key, "In" if match["set"] == "in" else "NotIn", values))
    return _checked(LabelSelectorRequirement(key, "Exists", ()))


def _checked(requirement: LabelSelectorRequirement) -> LabelSelectorRequirement:
    name = requirement.key.rpartition("/")[2]
    for one in (name, *(requirement.values or ())):
        if len(one) > _MAX_LENGTH or not _VALUE.fullmatch(one):
            raise ValueError(
                f"{one!r}: expected at most {_MAX_LENGTH} letters, digits, '-', '_' and '.',"
                " with a letter or digit at either end"
            )
    return requirement


class Condition(ObjectPart, frozen=True, gc=False):
    """A condition of a status."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    observed_generation: int = 0


T = TypeVar("T", bound=Object)
V = TypeVar("V")


class Column(msgspec.Struct, frozen=True):
    """A printer column of a custom resource definition."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0


AGE = Column("Age", ".metadata.creationTimestamp", "date")


class ListMeta(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={"resource_version": "resourceVersion", "continue_": "continue"},
):
    """Metadata of a list: its version, and the token of the next page."""

    resource_version: str = ""
    continue_: str = ""


class Kind(Generic[T]):
    """One kind, in the version that is read and written.

    `struct` is its only definition; the CRD schema of a custom kind is generated from it.
    """

    def __init__(
        self,
        struct: type[T],
        api_version: str,
        plural: str,
        *,
        kind: str = "",
        namespaced: bool = True,
        short: tuple[str, ...] = (),
        categories: tuple[str, ...] = (),
        columns: tuple[Column, ...] = (),
        status: bool = False,
    ) -> None:
        self.struct = struct
        self.kind = kind or struct.__name__
        self.group, _, self.version = api_version.rpartition("/")
        self.api_version = api_version
        self.plural = plural
        self.namespaced = namespaced
        self.short = short
        self.categories = categories
        self.columns = columns
        self.status = status
        """Whether the status is a subresource."""
        self._reduce: Callable[[Any], Any] | None = None

    def stored_as(self, keep: Callable[[T], Any]) -> Kind[Any]:
        """Return the same kind with tables that hold ``keep(object)``, which must have the object's ``key``.

        It saves memory for kinds with very many objects.
        """
        found: Kind[Any] = copy(self)
        found._reduce = keep  # of the same class
        return found

    def stored(self, row: T) -> Any:
        """Return what a table holds of a decoded object."""
        return row if self._reduce is None else self._reduce(row)

    @property
    def table(self) -> str:
        """The name of its table."""
        return f"k8s-{self.plural}"

    @property
    def qualified(self) -> str:
        """``pods``, ``ciliumnodes.cilium.io``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of an object or a collection."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        where = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        parts = [root + where, self.plural, name, subresource]
        return "/".join(part for part in parts if part)

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[T]:
        """Decodes one object. Raises msgspec.ValidationError."""
        return msgspec.json.Decoder(self.struct)

    @cached_property
    def present_decoder(self) -> msgspec.json.Decoder[Any]:
        """Decodes an ADDED or MODIFIED event of a watch. Raises msgspec.ValidationError."""
        fields: list[Any] = [("type", Literal["ADDED", "MODIFIED"]), ("object", self.struct)]
        struct = msgspec.defstruct(f"{self.kind}Event", fields, frozen=True, gc=False)
        return msgspec.json.Decoder(struct)

    @cached_property
    def page_decoder(self) -> msgspec.json.Decoder[Any]:
        """Decodes a list: ``metadata`` and ``items``. Raises msgspec.ValidationError."""
        items: Any = list[self.struct] | None  # type: ignore[name-defined]  # a type created at run time
        struct = msgspec.defstruct(
            f"{self.kind}List", [("metadata", ListMeta), ("items", items, None)], frozen=True, gc=False
        )
        return msgspec.json.Decoder(struct)

    def decode(self, text: bytes | msgspec.Raw) -> T:
        """Decode an object from JSON; null means absent. Raises msgspec.DecodeError, UnicodeDecodeError."""
        return decode(text, self.decoder)

    def convert(self, value: Any) -> T:
        """Convert parsed JSON or YAML to an object; null means absent. Raises msgspec.ValidationError."""
        return convert(value, self.struct)

    def __repr__(self) -> str:
        return f"<{self.qualified}>"


# Objects with null in a field of another type: null means that the field is absent.
#
# Source: encoding/json of Go, in which null leaves a field as it is, so an API server reads it as absent; of
# custom kinds, nulls of fields that are not nullable are pruned (Kubernetes, structural schemas, defaulting
# and nullable).
# Why:    ``kubectl create --dry-run=client -o yaml`` writes null fields. Servers hardly ever do, so only
#         objects that fail to decode are searched for nulls.

Clean = Callable[[Any], Any]


def convert(value: Any, kind: type[V]) -> V:
    """Convert a parsed value to this type; null means absent. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        whole: Any = kind
        clean = _cleaner(whole)
        cleaned = clean(value) if clean is not None else value
        if cleaned == value:
            raise
        return msgspec.convert(cleaned, kind)


def decode(text: bytes | str | msgspec.Raw, decoder: msgspec.json.Decoder[V]) -> V:
    """Decode JSON; null means absent. Raises msgspec.DecodeError, UnicodeDecodeError."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        if b"null" not in (text.encode() if isinstance(text, str) else bytes(text)):
            raise
    return convert(msgspec.json.decode(text), decoder.type)


@cache
def _cleaner(kind: Any) -> Clean | None:
    from msgspec.inspect import type_info  # rarely needed

    return _null_remover(type_info(kind))


def _null_remover(of: Any) -> Clean | None:
    """Return the function that removes null fields from values of a type; None if the type has no fields."""
    from msgspec import inspect

    if isinstance(of, inspect.UnionType):
        return next((clean for one in of.types if (clean := _null_remover(one)) is not None), None)
    if isinstance(of, inspect.StructType):
        return _without({one.encode_name: clean for one in of.fields if (clean := _null_remover(one.type))})
    if isinstance(of, inspect.DictType):
        return _map_null_remover(
            _null_remover(of.value_type), texts=isinstance(of.value_type, inspect.StrType)
        )
    if isinstance(of, (inspect.ListType, inspect.VarTupleType)):
        return _list_null_remover(_null_remover(of.item_type))
    return None


def _without(fields: Mapping[str, Clean]) -> Clean:
    def clean(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        left = {name: one for name, one in value.items() if one is not None}
        for name in fields.keys() & left.keys():
            left[name] = fields[name](left[name])
        return left

    return clean


def _map_null_remover(values: Clean | None, *, texts: bool) -> Clean | None:
    """Return the cleaner of a map; a null text becomes an empty one, as in Go."""

    def clean(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if texts:
            return {name: "" if one is None else one for name, one in value.items()}
        return {name: values(one) if values is not None else one for name, one in value.items()}

    return clean if texts or values is not None else None


def _list_null_remover(items: Clean | None) -> Clean | None:
    """Return the cleaner of a list; null items stay, since no kind allows them."""
    if items is None:
        return None
    return lambda value: [items(one) for one in value] if isinstance(value, list) else value
