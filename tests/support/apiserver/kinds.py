"""The resources a server knows: those built in, and those custom definitions add."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tests.support.apiserver.errors import FieldError, Obj, Resource
from tests.support.apiserver.rules import subdomain_problem
from tests.support.apiserver.types import Type, builtin_type

PACKAGES = {"": "core", "flowcontrol.apiserver.k8s.io": "flowcontrol"}
"""Where Kubernetes has the types of a group, when it is not the first part of its name."""
ROOTS = {
    "apiextensions.k8s.io": "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions",
    "apiregistration.k8s.io": "io.k8s.kube-aggregator.pkg.apis.apiregistration",
}


STATUS_METADATA = ("labels", "annotations", "finalizers", "ownerReferences")
NOWHERE = Resource("", "")


def selectable(*paths: str, **more: str) -> dict[str, str]:
    """The fields that field selectors may ask for, by names that are mostly their paths."""
    return {**{one: one for one in paths}, **more}


class Strategy:
    """What is particular about the objects of one kind. The base suits a kind without particulars."""

    empty: ClassVar[Obj] = {}
    """What the server writes of an object in which nothing is set, besides kind and metadata."""
    generations = False
    """Whether changes of the spec are counted."""
    create_on_update = False
    """Whether a PUT may create."""
    answers_object = False
    """Whether a DELETE is answered with the object."""
    graceful = False
    """Whether objects wait for a finalizer."""
    fields: ClassVar[Mapping[str, str]] = {}
    """What field selectors may ask for: name -> path in the object."""
    cached = True
    """Whether reads come from the watch cache; those of events come from the store."""
    selector_empty: ClassVar[Mapping[str, str]] = {}
    """What a field selector sees where a field is not set."""

    def name_problem(self, name: str) -> str:
        """What is wrong with a name."""
        return subdomain_problem(name)

    def defaults(self, obj: Obj) -> None:
        """Fill in the defaults, in place."""

    def admit_create(self, obj: Obj, server: Any) -> None:
        """Change a new object as admission does, in place; raises StatusError."""

    def prepare_create(self, obj: Obj, server: Any) -> None:
        """Fill in what only the server knows, in place."""

    def prepare_update(self, obj: Obj, old: Obj, server: Any) -> None:
        """The same of a change."""

    def validate(self, obj: Obj, server: Any) -> list[FieldError]:
        """What is wrong with an object."""
        return []

    def validate_update(self, obj: Obj, old: Obj, server: Any) -> list[FieldError]:
        """What is wrong with a change."""
        return self.validate(obj, server)

    def stored(self, obj: Obj, server: Any) -> None:
        """Called when an object was written."""

    def deleted(self, obj: Obj, server: Any) -> None:
        """Called when an object is deleted."""

    def grace(self, obj: Obj, options: Obj) -> int:
        """Seconds an object is given to end."""
        return 0

    def delete_finalizers(self, obj: Obj) -> list[str]:
        """Finalizers an object gets when it is deleted."""
        return []

    def main_update(self, old: Obj, new: Obj, subresource: str) -> Obj:
        """What of a write to the object itself counts."""
        return new

    def pending(self, obj: Obj) -> bool:
        """Whether something besides finalizers keeps a dying object."""
        return False

    def admit_update(self, obj: Obj, old: Obj, server: Any) -> None:
        """Change an update as admission does, in place."""

    def dying(self, obj: Obj) -> None:
        """Change an object that is about to end, in place."""

    def status_update(self, old: Obj, new: Obj) -> Obj:
        """What a write to /status makes of an object: of built-in kinds it may change metadata, too."""
        changed = {key: new["metadata"][key] for key in STATUS_METADATA if key in new["metadata"]}
        made = {**old, "metadata": {**old["metadata"], **changed}}
        made.pop("status", None)
        return {**made, "status": new["status"]} if "status" in new else made


@dataclass
class Kind:
    """One version of one resource."""

    group: str
    version: str
    plural: str
    singular: str
    kind: str
    namespaced: bool
    verbs: tuple[str, ...]
    type: Type
    strategy: Strategy
    short: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: dict[str, Obj] = field(default_factory=dict)
    storage: Resource = NOWHERE
    custom: Any = None
    """The version of the custom resource definition, of a custom kind."""
    list_kind: str = ""
    hash: str = ""

    @property
    def api_version(self) -> str:
        """``v1``, ``apps/v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> Resource:
        """As messages name it."""
        return Resource(self.group, self.plural)

    @property
    def status(self) -> bool:
        """Whether it has a status subresource."""
        return "status" in self.subresources

    @property
    def listed(self) -> str:
        """The kind of its lists."""
        return self.list_kind or f"{self.kind}List"


def now(after: int = 0) -> str:
    """The time as Kubernetes writes it; some seconds from now."""
    return (datetime.now(UTC) + timedelta(seconds=after)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Call:
    """What one write is about."""

    kind: Kind
    namespace: str
    name: str
    subresource: str = ""
    dry_run: bool = False
    strict: str = "Warn"
    warnings: list[str] = field(default_factory=list)


class Registry:
    """Every kind that is served now."""

    def __init__(self, strategies: Mapping[Resource, Strategy]) -> None:
        self._kinds: dict[tuple[str, str, str], Kind] = {}
        self.groups: dict[str, list[str]] = {}
        for group_version, resources in _builtin().items():
            group, _, version = group_version.rpartition("/")
            if group:
                self.groups.setdefault(group, []).append(version)
            for kind in _kinds(group, version, resources, strategies):
                self._kinds[group, version, kind.plural] = kind
        self.builtin_groups = frozenset(self.groups)

    def get(self, group: str, version: str, plural: str) -> Kind | None:
        """One kind."""
        return self._kinds.get((group, version, plural))

    def of(self, group: str, version: str) -> list[Kind]:
        """The kinds of one version of a group."""
        return [kind for (g, v, _), kind in self._kinds.items() if (g, v) == (group, version)]

    def all(self) -> list[Kind]:
        """Every kind."""
        return list(self._kinds.values())

    def storing(self, resource: Resource) -> Kind:
        """A kind with objects stored as this resource."""
        return next(kind for kind in self._kinds.values() if kind.storage == resource)

    def add(self, kind: Kind) -> None:
        """Serve a kind."""
        self._kinds[kind.group, kind.version, kind.plural] = kind
        versions = self.groups.setdefault(kind.group, [])
        if kind.version not in versions:
            versions.append(kind.version)
            versions.sort(key=version_order)

    def remove(self, group: str, plural: str) -> None:
        """Serve a resource no more."""
        self._kinds = {key: kind for key, kind in self._kinds.items() if (key[0], key[2]) != (group, plural)}
        left = {version for g, version, _ in self._kinds if g == group}
        if left:
            self.groups[group] = [version for version in self.groups[group] if version in left]
        elif group not in self.builtin_groups:
            self.groups.pop(group, None)


def version_order(version: str) -> tuple[int, int, int]:
    """A key that sorts versions as Kubernetes prefers them: v2, v1, v1beta1, v2alpha1."""
    head = version.lstrip("v")
    for rank, word in ((2, "alpha"), (1, "beta")):
        if word in head:
            major, _, minor = head.partition(word)
            return (rank, -int(major or 0), -int(minor or 0))
    return (0, -int(head or 0) if head.isdigit() else 0, 0)


@cache
def _builtin() -> dict[str, list[Obj]]:
    found: dict[str, list[Obj]] = json.loads(Path(__file__).with_name("resources.json").read_bytes())
    return found


def _kinds(
    group: str, version: str, resources: list[Obj], strategies: Mapping[Resource, Strategy]
) -> list[Kind]:
    found: dict[str, Kind] = {}
    for one in resources:
        name, _, sub = one["name"].partition("/")
        if sub:
            found[name].subresources[sub] = one
            continue
        root = ROOTS.get(group) or f"io.k8s.api.{PACKAGES.get(group) or group.split('.', maxsplit=1)[0]}"
        storage = Resource(group, name)
        found[name] = Kind(
            group,
            version,
            name,
            one["singularName"],
            one["kind"],
            one["namespaced"],
            tuple(one["verbs"]),
            builtin_type(f"{root}.{version}.{one['kind']}"),
            strategies.get(Resource(group, name)) or Strategy(),
            tuple(one.get("shortNames", ())),
            tuple(one.get("categories", ())),
            storage=storage,
            hash=one.get("storageVersionHash", ""),
        )
    return list(found.values())
