"""A kind of object: where it is served, how it is decoded, what its definition says.

Needs: nothing.   Gives: Kind, Column.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from cells.kubernetes.objects import nulls
from cells.kubernetes.objects.meta import Object

T = TypeVar("T", bound=Object)


class Column(NamedTuple):
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

    def kept_as(self, keep: Callable[[T], Any]) -> Kind[Any]:
        """The same kind, of which tables hold what ``keep`` makes of an object; it has the object's ``key``.

        For objects of which there are very many.
        """
        found: Kind[Any] = copy(self)
        found._keep = keep  # of the same class
        return found

    def kept(self, row: T) -> Any:
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
    def event_decoder(self) -> msgspec.json.Decoder[Any]:
        """Of a line of a watch: ``type`` and ``object``. Raises msgspec.ValidationError."""
        made = msgspec.defstruct(
            f"{self.kind}Event", [("type", str), ("object", self.struct)], frozen=True, gc=False
        )
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
