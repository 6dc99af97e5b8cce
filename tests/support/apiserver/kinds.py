"""The resources a server knows: those built in, and those custom definitions add.

Gives: Kind, Registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tests.support.apiserver.errors import FieldError, Obj, Resource
from tests.support.apiserver.names import subdomain_problem
from tests.support.apiserver.types import Type, builtin_type

GROUP_PACKAGES = {
    "rbac.authorization.k8s.io": "rbac",
    "networking.k8s.io": "networking",
    "discovery.k8s.io": "discovery",
    "coordination.k8s.io": "coordination",
    "events.k8s.io": "events",
    "storage.k8s.io": "storage",
    "scheduling.k8s.io": "scheduling",
    "node.k8s.io": "node",
    "flowcontrol.apiserver.k8s.io": "flowcontrol",
    "admissionregistration.k8s.io": "admissionregistration",
    "authentication.k8s.io": "authentication",
    "authorization.k8s.io": "authorization",
    "certificates.k8s.io": "certificates",
    "resource.k8s.io": "resource",
    "": "core",
}
ROOTS = {
    "apiextensions.k8s.io": "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions",
    "apiregistration.k8s.io": "io.k8s.kube-aggregator.pkg.apis.apiregistration",
}


NOWHERE = Resource("", "")


class Strategy:
    """What is particular about the objects of one kind. The base suits a kind without particulars."""

    empty: ClassVar[Obj] = {}
    """What the server writes of an object in which nothing is set, besides kind and metadata."""
    generations = False
    """Whether changes of the spec are counted."""
    unconditional = True
    """Whether a PUT may come without a version."""
    create_on_update = False
    """Whether a PUT may create."""
    answers_object = False
    """Whether a DELETE is answered with the object."""
    graceful = False
    """Whether objects wait for somebody to end them."""
    fields: ClassVar[Mapping[str, str]] = {}
    """What field selectors may ask for: name -> path in the object."""
    any_field = False
    """Whether the words of a refused field selector are those of typed kinds."""
    cached = True
    """Whether reads come from the watch cache; those of events come from the store."""
    selector_empty: ClassVar[Mapping[str, str]] = {}
    """What a field selector sees where a field is not set."""
    resets: tuple[tuple[str, ...], ...] = ()
    keeps: frozenset[str] = frozenset()
    """Paths whose empty values are written."""

    def name_problem(self, name: str) -> str:
        """What is wrong with a name."""
        return subdomain_problem(name)

    def defaults(self, obj: Obj) -> None:
        """Fill in what was not said, in place."""

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
        """Called when an object is gone."""

    from_storage: Callable[[Obj, Any], Obj] | None = None
    """How a stored object becomes one of this kind's version."""
    to_storage: Callable[[Obj, Any], Obj] | None = None
    status_in_main: frozenset[str] = frozenset()
    """Holds ``status`` where a PUT of the object writes its status, too."""

    def grace(self, obj: Obj, options: Obj) -> int:
        """Seconds an object is given to end."""
        return 0

    error_group: str | None = None
    """The group that refusals name, when it is not the kind's."""

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
        """What a write to /status makes of an object."""
        made = {key: value for key, value in old.items() if key != "status"}
        metadata = {
            **old["metadata"],
            **{key: new["metadata"][key] for key in self.status_metadata if key in new["metadata"]},
        }
        made["metadata"] = metadata
        return {**made, "status": new["status"]} if "status" in new else made

    status_metadata: tuple[str, ...] = (
        "labels",
        "annotations",
        "managedFields",
        "finalizers",
        "ownerReferences",
    )
    """What of the metadata a write to /status may change."""

    def warnings(self, obj: Obj) -> list[str]:
        """What the server wants to say about an object it accepts."""
        return []


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
    convert: Callable[[Obj], Obj] | None = None

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
        """A kind whose objects are stored as this resource."""
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
        root = ROOTS.get(group) or f"io.k8s.api.{GROUP_PACKAGES.get(group, group)}"
        storage = Resource("", "events") if group == "events.k8s.io" else Resource(group, name)
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
