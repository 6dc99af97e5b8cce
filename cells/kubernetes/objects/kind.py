"""A kind of object: where it is served, how it is decoded, and its definition."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import msgspec

from cells.kubernetes.objects import nulls

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
]


# What every object of Kubernetes has.
#
# Source: Kubernetes API conventions, metadata; k8s.io/apimachinery/pkg/apis/meta/v1.
#
# The structs are narrow: what is not read is not decoded. ``resourceVersion`` and ``managedFields`` are left
# out on purpose, so that a write which changes nothing we read changes no row.

Key = tuple[str, str]
"""Namespace, empty for objects of the cluster, and name."""


class ObjectPart(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part of an object: names in camel case, defaults not written."""


class OwnerReference(ObjectPart, frozen=True, gc=False):
    """The object that an object belongs to."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(ObjectPart, frozen=True, gc=False):
    """What is read of ``metadata``."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class DatedMeta(Meta, frozen=True, gc=False):
    """The same, of kinds with an age that matters."""

    creation_timestamp: str = ""


class Object(ObjectPart, frozen=True, gc=False):
    """An object, with its key and labels at hand."""

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
        """Its namespace; empty for an object of the cluster."""
        return self.metadata.namespace

    @property
    def labels(self) -> dict[str, str]:
        """Its labels; not to be changed."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations; not to be changed."""
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
    """A label selector; an empty one selects everything, none at all nothing."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[LabelSelectorRequirement, ...] | None = None

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether labels fulfil it. Operators that Kubernetes does not have match nothing."""
        wanted = self.match_labels or {}
        if any(labels.get(key) != value for key, value in wanted.items()):
            return False
        return all(_fulfils(labels, one) for one in self.match_expressions or ())


def _fulfils(labels: dict[str, str], requirement: LabelSelectorRequirement) -> bool:
    value, values = labels.get(requirement.key), requirement.values or ()
    if requirement.operator == "In":
        return value is not None and value in values
    if requirement.operator == "NotIn":
        return value not in values
    if requirement.operator == "Exists":
        return value is not None
    return requirement.operator == "DoesNotExist" and value is None


class Condition(ObjectPart, frozen=True, gc=False):
    """One condition of a status."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    observed_generation: int = 0


T = TypeVar("T", bound=Object)


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
    """Of a list: its version, and where it goes on."""

    resource_version: str = ""
    continue_: str = ""


class Kind(Generic[T]):
    """One kind in the version that is read and written.

    `struct` is its only definition; the schema of a custom kind is made from it too.
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
        """Whether the status is written on a path of its own."""
        self._keep: Callable[[Any], Any] | None = None

    def stored_as(self, keep: Callable[[T], Any]) -> Kind[Any]:
        """The same kind, of which tables hold what ``keep`` makes of an object; it has the object's ``key``.

        For objects of which there are very many.
        """
        found: Kind[Any] = copy(self)
        found._keep = keep  # of the same class
        return found

    def stored(self, row: T) -> Any:
        """What a table holds of an object that was read."""
        return row if self._keep is None else self._keep(row)

    @property
    def table(self) -> str:
        """The name of its table."""
        return f"k8s-{self.plural}"

    @property
    def qualified(self) -> str:
        """``pods``, ``ciliumnodes.cilium.io``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of one object or of a collection."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        where = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        parts = [root + where, self.plural, name, subresource]
        return "/".join(part for part in parts if part)

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[T]:
        """Of one object. Raises msgspec.ValidationError."""
        return msgspec.json.Decoder(self.struct)

    @cached_property
    def present_decoder(self) -> msgspec.json.Decoder[Any]:
        """Of a line of a watch about an object that exists. Raises msgspec.ValidationError."""
        fields: list[Any] = [("type", Literal["ADDED", "MODIFIED"]), ("object", self.struct)]
        made = msgspec.defstruct(f"{self.kind}Event", fields, frozen=True, gc=False)
        return msgspec.json.Decoder(made)

    @cached_property
    def page_decoder(self) -> msgspec.json.Decoder[Any]:
        """Of a list: ``metadata`` and ``items``. Raises msgspec.ValidationError."""
        items: Any = list[self.struct] | None  # type: ignore[name-defined]  # a type made when it runs
        made = msgspec.defstruct(
            f"{self.kind}List", [("metadata", ListMeta), ("items", items, None)], frozen=True, gc=False
        )
        return msgspec.json.Decoder(made)

    def decode(self, text: bytes | msgspec.Raw) -> T:
        """One object out of JSON; null means absent. Raises msgspec.DecodeError, UnicodeDecodeError."""
        return nulls.decode(text, self.decoder)

    def convert(self, value: Any) -> T:
        """One object out of what JSON or YAML holds; null means absent. Raises msgspec.ValidationError."""
        return nulls.convert(value, self.struct)

    def __repr__(self) -> str:
        return f"<{self.qualified}>"
