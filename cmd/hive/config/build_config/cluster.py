"""The objects that build-config reads from Kubernetes, and the interface of their sources.

Source: CiliumNodeConfig (cilium.io/v2), LabelSelector of the Kubernetes API.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class ClusterError(Exception):
    """The cluster cannot be queried, or its answer is invalid; one line."""


@dataclass(frozen=True, slots=True)
class Expression:
    """One requirement of a selector: In, NotIn, Exists or DoesNotExist."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels match; a missing label is in no set, so NotIn matches."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        raise ClusterError(f"selector operator {self.operator!r}: expected In, NotIn, Exists or DoesNotExist")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """A CiliumNodeConfig: settings for the nodes its selector matches."""

    namespace: str
    name: str
    defaults: Mapping[str, str]
    selector: tuple[Expression, ...] | None
    """None selects nothing, and the empty selector everything."""

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether it applies to a node with these labels."""
        return self.selector is not None and all(one.matches(labels) for one in self.selector)


@dataclass(frozen=True, slots=True)
class Node:
    """The fields of a Node that are read."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """A source of objects. Methods raise ClusterError."""

    def config_map(self, namespace: str, name: str) -> Mapping[str, str] | None:
        """Return the data of a ConfigMap, or None."""
        ...

    def node_configs(self, namespace: str) -> list[NodeConfig]:
        """Return all CiliumNodeConfigs of a namespace."""
        ...

    def node(self, name: str) -> Node | None:
        """Return a node, or None."""
        ...
