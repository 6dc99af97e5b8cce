"""What every object of Kubernetes has.

Needs: nothing.   Gives: Meta, DatedMeta, Object, Selector, Requirement, Condition, Key.
Source: Kubernetes API conventions, metadata; k8s.io/apimachinery/pkg/apis/meta/v1.

The structs are narrow: what is not read is not decoded. ``resourceVersion`` and ``managedFields`` are left
out on purpose, so that a write which changes nothing we read is no change of a row.
"""

from __future__ import annotations

import msgspec

Key = tuple[str, str]
"""Namespace, empty for objects of the cluster, and name."""


class Wire(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part of an object: names in camel case, defaults not written."""


class OwnerReference(Wire, frozen=True, gc=False):
    """Whom an object goes with."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(Wire, frozen=True, gc=False):
    """What is read of ``metadata``."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class DatedMeta(Meta, frozen=True, gc=False):
    """The same, of kinds whose age matters."""

    creation_timestamp: str = ""


class Object(Wire, frozen=True, gc=False):
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
        """Whether its deletion has begun."""
        return self.metadata.deletion_timestamp is not None


class Requirement(Wire, frozen=True, gc=False):
    """One expression of a label selector."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None


class Selector(Wire, frozen=True, gc=False):
    """A label selector; an empty one selects everything, none at all nothing."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[Requirement, ...] | None = None

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether labels fulfil it. Operators that Kubernetes does not have match nothing."""
        wanted = self.match_labels or {}
        if any(labels.get(key) != value for key, value in wanted.items()):
            return False
        return all(_fulfils(labels, one) for one in self.match_expressions or ())


def _fulfils(labels: dict[str, str], requirement: Requirement) -> bool:
    value, values = labels.get(requirement.key), requirement.values or ()
    if requirement.operator == "In":
        return value is not None and value in values
    if requirement.operator == "NotIn":
        return value not in values
    if requirement.operator == "Exists":
        return value is not None
    return requirement.operator == "DoesNotExist" and value is None


class Condition(Wire, frozen=True, gc=False):
    """One condition of a status."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    observed_generation: int = 0
