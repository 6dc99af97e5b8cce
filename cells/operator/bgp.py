"""Creates a CiliumBGPNodeConfig for each node that a CiliumBGPClusterConfig selects.

A pure function computes the desired NodeConfigs and conditions from CiliumBGPClusterConfigs,
CiliumBGPNodeConfigOverrides, CiliumNodes, CiliumBGPNodeConfigs, CiliumBGPPeerConfigs and the names of
secrets. Reconcilers write the differences.

The owner reference of a NodeConfig names its ClusterConfig, so two ClusterConfigs that select one node cannot
overwrite each other; the API server deletes NodeConfigs of a deleted owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal

import msgspec

from cells.kubernetes.client.errors import ConflictError
from cells.kubernetes.objects.cilium_bgp import (
    CILIUM_BGP_CLUSTER_CONFIGS,
    CILIUM_BGP_NODE_CONFIG_OVERRIDES,
    CILIUM_BGP_NODE_CONFIGS,
    CILIUM_BGP_PEER_CONFIGS,
    BGPClusterInstance,
    BGPNodeConfigSpec,
    BGPNodeInstance,
    BGPNodePeer,
    BGPOverrideInstance,
    CiliumBGPClusterConfig,
    CiliumBGPNodeConfig,
    CiliumBGPNodeConfigOverride,
    CiliumBGPPeerConfig,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.kind import Condition, Kind, OwnerReference
from cells.operator.api_server import ClusterAPI, ObjectWriter
from cells.operator.lb_ipam import ConditionsPatch, ConditionsWriter
from cells.operator.objects import CLUSTER_SECRETS, ClusterObjects, wait_any
from lifecycle import (
    Health,
    Jobs,
    Logger,
    Reconciler,
    Settings,
    Table,
    Tables,
    config,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["BGPNodeConfigs", "BGPOperatorSettings", "NodeConfigPatch", "cell"]


class BGPOperatorSettings(Settings, frozen=True):
    """Settings of the bgp cell; used with enable-bgp-control-plane."""

    bgp_secrets_namespace: str = ""
    """Namespace of the secrets with peers' passwords. A CiliumBGPPeerConfig that names a missing secret gets
    a condition. Empty: secrets are not checked.
    """

    enable_bgp_control_plane_status_report: bool = True
    """Report missing references and conflicts in conditions of CiliumBGPClusterConfigs and
    CiliumBGPPeerConfigs; false: remove existing conditions.
    """


# The desired objects, as pure functions of the actual ones.
#
# Source: Cilium 1.17, operator/pkg/bgpv2, and its conditions. Unlike Cilium, a NodeConfig that others change
# or delete is restored at once, and a recreated ClusterConfig adopts its NodeConfigs before they are
# garbage-collected with their old owner.


class NodeConfigPatch(msgspec.Struct, frozen=True, gc=False):
    """A change of a node's CiliumBGPNodeConfig."""

    name: str
    action: Literal["create", "update", "delete"]
    uid: str = ""
    """UID of the current NodeConfig; empty to create one."""
    owner: OwnerReference = OwnerReference()
    spec: BGPNodeConfigSpec | None = None


class BGPPlan(msgspec.Struct, frozen=True):
    """The pending changes of NodeConfigs, ClusterConfigs and PeerConfigs."""

    node_configs: list[NodeConfigPatch]
    cluster_configs: list[ConditionsPatch]
    peer_configs: list[ConditionsPatch]
    conflicts: dict[str, str]
    """Node -> why its NodeConfig is not changed."""


class BGPInput(msgspec.Struct, frozen=True):
    """The input of plan(). Overrides and NodeConfigs have the name of their node."""

    cluster_configs: list[CiliumBGPClusterConfig]
    overrides: Mapping[str, CiliumBGPNodeConfigOverride]
    node_labels: Mapping[str, dict[str, str]]
    node_configs: Mapping[str, CiliumBGPNodeConfig]
    peer_configs: Mapping[str, CiliumBGPPeerConfig]
    secrets: frozenset[str] | None
    """Names of the existing secrets; None if secrets are not checked."""
    reports: bool
    """Whether conditions are reported; if not, they are removed."""


def node_spec(
    instances: Iterable[BGPClusterInstance], override: CiliumBGPNodeConfigOverride | None
) -> BGPNodeConfigSpec:
    """Return a ClusterConfig's instances with a node's overrides; unknown instances are ignored."""
    changes = {one.name: one for one in override.spec.bgp_instances} if override is not None else {}
    return BGPNodeConfigSpec(tuple(_instance(one, changes.get(one.name)) for one in instances))


def _instance(instance: BGPClusterInstance, change: BGPOverrideInstance | None) -> BGPNodeInstance:
    change = change or BGPOverrideInstance(instance.name)
    own = {one.name: one.local_address for one in change.peers or ()}
    peers = tuple(
        BGPNodePeer(
            name=one.name,
            peer_address=one.peer_address,
            peer_asn=one.peer_asn,
            local_address=own.get(one.name, ""),
            peer_config_ref=one.peer_config_ref,
        )
        for one in instance.peers or ()
    )
    return BGPNodeInstance(
        name=instance.name,
        local_asn=change.local_asn or instance.local_asn,
        router_id=change.router_id,
        local_port=change.local_port,
        peers=peers or None,
    )


def plan(found: BGPInput) -> BGPPlan:
    """Compute the changes. A node without an owner goes to the first ClusterConfig by name."""
    configs = sorted(found.cluster_configs, key=lambda one: one.name)
    selected = {one.name: set(_selected(one, found.node_labels)) for one in configs}
    owners = {name: _owner(one) for name, one in found.node_configs.items()}
    patches: list[NodeConfigPatch] = []
    conflicts: dict[str, str] = {}
    lost: dict[str, set[str]] = {one.name: set() for one in configs}
    """ClusterConfig -> the ClusterConfigs that own nodes which it selects, too."""
    for config_ in configs:
        reference = _reference(config_)
        for node in sorted(selected[config_.name]):
            owner = owners.setdefault(node, config_.name)
            if owner == config_.name:
                wanted = node_spec(config_.spec.bgp_instances, found.overrides.get(node))
                patch = _patch(node, found.node_configs.get(node), wanted, reference)
                patches += [patch] if patch is not None else []
            elif owner is None:
                conflicts[node] = "its CiliumBGPNodeConfig has no CiliumBGPClusterConfig as its owner"
            elif node in selected.get(owner, {node}):
                lost[config_.name].add(owner)
                conflicts[node] = f"CiliumBGPClusterConfigs {owner} and {config_.name} select it"
    patches += [
        NodeConfigPatch(name, "delete", one.metadata.uid)
        for name, one in found.node_configs.items()
        if (owner := owners[name]) is not None and name not in selected.get(owner, {name})
    ]
    known = found.peer_configs.keys()
    return BGPPlan(
        patches,
        [
            one
            for each in configs
            if (one := _cluster_conditions(each, selected[each.name], lost[each.name], known, found.reports))
        ],
        [one for each in found.peer_configs.values() if (one := _peer_conditions(each, found))],
        conflicts,
    )


def _selected(config_: CiliumBGPClusterConfig, labels: Mapping[str, dict[str, str]]) -> Iterator[str]:
    selector = config_.spec.node_selector
    return (node for node, each in labels.items() if selector is None or selector.matches(each))


def _owner(config_: CiliumBGPNodeConfig) -> str | None:
    """Return the name of the ClusterConfig that owns a NodeConfig, or None."""
    kind = CILIUM_BGP_CLUSTER_CONFIGS.kind
    owners = config_.metadata.owner_references or ()
    return next((one.name for one in owners if one.kind == kind), None)


def _reference(config_: CiliumBGPClusterConfig) -> OwnerReference:
    kind = CILIUM_BGP_CLUSTER_CONFIGS
    return OwnerReference(kind.api_version, kind.kind, config_.name, config_.metadata.uid)


def _patch(
    node: str, live: CiliumBGPNodeConfig | None, wanted: BGPNodeConfigSpec, owner: OwnerReference
) -> NodeConfigPatch | None:
    if live is None:
        return NodeConfigPatch(node, "create", owner=owner, spec=wanted)
    owned = any(one.uid == owner.uid for one in live.metadata.owner_references or ())
    if live.spec == wanted and owned:
        return None
    return NodeConfigPatch(node, "update", live.metadata.uid, owner, wanted)


# Conditions: type, status, reason, message.

_PREFIX: Final = "cilium.io/"
_CLUSTER_TYPES: Final = {
    "ConflictingClusterConfig": "ConflictingClusterConfigs",
    "MissingPeerConfigs": "MissingPeerConfigs",
    "NoMatchingNode": "NoMatchingNode",
}
_PEER_TYPES: Final = {"MissingAuthSecret": "MissingAuthSecret"}
"""Type -> reason, ordered by type."""
_NO_NODE: Final = "No node matches spec.nodeSelector"


def _cluster_conditions(
    config_: CiliumBGPClusterConfig,
    selected: Iterable[str],
    lost: Iterable[str],
    known: Iterable[str],
    reports: bool,
) -> ConditionsPatch | None:
    named = {
        peer.peer_config_ref.name
        for instance in config_.spec.bgp_instances
        for peer in instance.peers or ()
        if peer.peer_config_ref is not None
    }
    missing = named.difference(known)
    others, absent = " ".join(sorted(lost)), " ".join(sorted(missing))
    messages = {
        "ConflictingClusterConfig": f"Selecting the same node(s) with ClusterConfig(s): [{others}]"
        if others
        else "",
        "MissingPeerConfigs": f"Referenced CiliumBGPPeerConfig(s) are missing: [{absent}]" if absent else "",
        "NoMatchingNode": "" if any(selected) else _NO_NODE,
    }
    return _conditions(config_, _CLUSTER_TYPES, messages, reports)


def _peer_conditions(config_: CiliumBGPPeerConfig, found: BGPInput) -> ConditionsPatch | None:
    if found.secrets is None and found.reports:
        return None
    name = config_.spec.auth_secret_ref
    missing = name is not None and name not in (found.secrets or ())
    messages = {"MissingAuthSecret": f'Referenced Auth Secret "{name}" is missing' if missing else ""}
    return _conditions(config_, _PEER_TYPES, messages, found.reports)


def _conditions(
    object_: CiliumBGPClusterConfig | CiliumBGPPeerConfig,
    types: Mapping[str, str],
    messages: Mapping[str, str],
    reports: bool,
) -> ConditionsPatch | None:
    """Return the difference between desired and actual conditions. A condition with a message is true."""
    held = {one.type: _shown(one) for one in object_.status.conditions or ()}
    name, uid, generation = object_.name, object_.metadata.uid, object_.metadata.generation
    if not reports:
        removed = frozenset(_PREFIX + one for one in types)
        stale = not removed.isdisjoint(held)
        return ConditionsPatch(name, uid, generation, (), removed) if stale else None
    wanted = tuple(
        (
            _PREFIX + kind,
            str(bool(messages[kind])),
            reason,
            _NO_NODE if kind == "NoMatchingNode" else messages[kind],
        )
        for kind, reason in types.items()
    )
    if all(held.get(one[0]) == (*one[1:], generation) for one in wanted):
        return None
    return ConditionsPatch(name, uid, generation, wanted)


def _shown(one: Condition) -> tuple[str, str, str, int]:
    return one.status, one.reason, one.message, one.observed_generation


# Computes a new plan whenever a source changes.

AGAIN: Final = minutes(1)
"""Interval at which failed or missing writes are retried."""


class BGPObjects:
    """The tables that are read and written; all are empty while BGP is off."""

    def __init__(self, settings: BGPOperatorSettings, objects: ClusterObjects, tables: Tables) -> None:
        self.active = objects.resources.bgp
        """Whether the custom resources of BGP are registered."""
        self.reports = settings.enable_bgp_control_plane_status_report
        """Whether conditions are reported."""
        self.node_patches: Table[str, NodeConfigPatch] = Table(
            "bgp-node-config-requests", key=lambda one: one.name
        )
        """Pending changes of NodeConfigs, by node."""
        self.cluster_patches: Table[str, ConditionsPatch] = Table(
            "bgp-cluster-config-conditions", key=lambda one: one.name
        )
        """Pending conditions of ClusterConfigs, by name."""
        self.peer_patches: Table[str, ConditionsPatch] = Table(
            "bgp-peer-config-conditions", key=lambda one: one.name
        )
        """Pending conditions of PeerConfigs, by name."""
        if not self.active:
            return
        self.cluster_configs = objects.table(CILIUM_BGP_CLUSTER_CONFIGS)
        self.overrides = objects.table(CILIUM_BGP_NODE_CONFIG_OVERRIDES)
        self.node_configs = objects.table(CILIUM_BGP_NODE_CONFIGS)
        self.peer_configs = objects.table(CILIUM_BGP_PEER_CONFIGS)
        self.nodes = objects.table(CILIUM_NODES)
        namespace = settings.bgp_secrets_namespace
        self.secrets = objects.table(CLUSTER_SECRETS, namespace) if namespace and self.reports else None
        for table in (self.node_patches, self.cluster_patches, self.peer_patches):
            tables.add(table)

    @property
    def sources(self) -> list[Table[Any, Any]]:
        """The tables that a plan is computed from."""
        found: list[Table[Any, Any]] = [
            self.cluster_configs,
            self.overrides,
            self.node_configs,
            self.peer_configs,
            self.nodes,
        ]
        return found if self.secrets is None else [*found, self.secrets]

    def read(self) -> BGPInput:
        """Return a snapshot of the tables."""
        return BGPInput(
            cluster_configs=list(self.cluster_configs.all()),
            overrides={one.name: one for one in self.overrides.all()},
            node_labels={one.name: one.labels for one in self.nodes.all()},
            node_configs={one.name: one for one in self.node_configs.all()},
            peer_configs={one.name: one for one in self.peer_configs.all()},
            secrets=None if self.secrets is None else frozenset(one.name for one in self.secrets.all()),
            reports=self.reports,
        )


class BGPNodeConfigs:
    """Keeps the plan up to date; starts once all sources are synchronized."""

    def __init__(self, objects: BGPObjects, *, jobs: Jobs, health: Health, log: Logger) -> None:
        self._objects = objects
        self._health = health.child("node-configs")
        self._log = log
        self._conflicts: dict[str, str] = {}
        if objects.active:
            jobs.one_shot("plan", self._run)

    async def _run(self) -> None:
        sources = self._objects.sources
        for table in sources:
            await table.wait_initialized()
        feeds = [
            table.changes(only=_labels_changed) if table is self._objects.nodes else table.changes()
            for table in sources
        ]
        while True:
            changed = [feed.take() for feed in feeds]
            if any(changed):
                self._pass()
            await wait_any(*(feed.wait for feed in feeds))

    def _pass(self) -> None:
        objects, found = self._objects, plan(self._objects.read())
        with objects.node_patches.txn() as node_txn:
            node_txn.replace_all(found.node_configs)
        with objects.cluster_patches.txn() as cluster_txn:
            cluster_txn.replace_all(found.cluster_configs)
        with objects.peer_patches.txn() as peer_txn:
            peer_txn.replace_all(found.peer_configs)
        for node, why in found.conflicts.items():
            if self._conflicts.get(node) != why:
                self._log.warning("node keeps its CiliumBGPNodeConfig", node=node, why=why)
        self._conflicts = found.conflicts
        if found.conflicts:
            node, why = next(iter(sorted(found.conflicts.items())))
            self._health.degraded(f"{len(found.conflicts)} nodes in conflict; {node}: {why}")
        else:
            self._health.ok("every selected node has its CiliumBGPNodeConfig")


def _labels_changed(key: object, old: CiliumNode | None, new: CiliumNode | None) -> bool:
    del key
    return old is None or new is None or old.labels != new.labels


# Writes CiliumBGPNodeConfigs.


class NodeConfigWriter(ObjectWriter[str, NodeConfigPatch]):
    """Writes metadata and spec of CiliumBGPNodeConfigs, not their status."""

    async def write(self, patch: NodeConfigPatch) -> None:
        """Write a change; an object that exists already is left to the next event of the watch.

        Raises KubernetesError.
        """
        client, kind = self.server.client, CILIUM_BGP_NODE_CONFIGS
        if patch.action == "delete":
            await client.delete(kind, patch.name, uid=patch.uid)
        elif patch.action == "update":
            await client.update(kind, patch.name, partial(_updated, patch))
        else:
            metadata = {"name": patch.name, "ownerReferences": [msgspec.to_builtins(patch.owner)]}
            body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
            try:
                await client.create(kind, {**body, "spec": msgspec.to_builtins(patch.spec)})
            except ConflictError as error:
                if not error.exists:
                    raise


def _updated(patch: NodeConfigPatch, live: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object with the desired spec and owner, or None if it was recreated.

    Its status and other owners are unchanged.
    """
    metadata = live["metadata"]
    if metadata.get("uid") != patch.uid:
        return None
    owner = msgspec.to_builtins(patch.owner)
    references = [
        {**one, **owner} if (one.get("kind"), one.get("name")) == (owner["kind"], owner["name"]) else one
        for one in metadata.get("ownerReferences") or ()
    ]
    changed = {**metadata, "ownerReferences": references}
    return {**live, "metadata": changed, "spec": msgspec.to_builtins(patch.spec)}


def write(server: ClusterAPI, objects: BGPObjects, jobs: Jobs) -> None:
    """Start the reconcilers of NodeConfigs and conditions, if BGP is on."""
    if not objects.active:
        return
    node_configs = Reconciler(
        objects.node_patches, NodeConfigWriter(server), full_every=AGAIN, put_early=True
    )
    jobs.observe("write-node-configs", node_configs)
    conditions: list[tuple[Table[str, ConditionsPatch], Kind[Any]]] = [
        (objects.cluster_patches, CILIUM_BGP_CLUSTER_CONFIGS),
        (objects.peer_patches, CILIUM_BGP_PEER_CONFIGS),
    ]
    for table, kind in conditions:
        writer = Reconciler(table, ConditionsWriter(server, kind), full_every=AGAIN, put_early=True)
        jobs.observe(f"write-conditions-of-{kind.plural}", writer)


cell = module(
    "bgp",
    "BGP routers of nodes",
    config(BGPOperatorSettings),
    provide(BGPObjects, BGPNodeConfigs),
    invoke(write, BGPNodeConfigs),
)
