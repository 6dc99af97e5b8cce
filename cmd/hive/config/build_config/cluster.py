"""Reads for build-config from Kubernetes.

Source: CiliumNodeConfig (cilium.io/v2), LabelSelector of the Kubernetes API.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class ClusterError(Exception):
    """The cluster cannot be asked, or its answer cannot be understood: one line."""


@dataclass(frozen=True, slots=True)
class Expression:
    """One requirement of a selector: In, NotIn, Exists or DoesNotExist."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it; a label that is not there is in no set, so NotIn holds for it."""
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
        """Whether it is for a node with these labels."""
        return self.selector is not None and all(one.matches(labels) for one in self.selector)


@dataclass(frozen=True, slots=True)
class Node:
    """What of a Node matters here."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """Where the objects are. Methods raise ClusterError."""

    def config_map(self, namespace: str, name: str) -> Mapping[str, str] | None:
        """The data of a ConfigMap, or None if there is none of that name."""
        ...

    def node_configs(self, namespace: str) -> list[NodeConfig]:
        """All CiliumNodeConfigs of a namespace."""
        ...

    def node(self, name: str) -> Node | None:
        """A node, or None."""
        ...
