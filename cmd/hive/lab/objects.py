"""``hive lab apply``, ``delete`` and ``get``: Kubernetes objects of lab nodes, in manifest files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from cells.kubernetes.objects.core import HEADLESS, PROXY_NAME
from hive.client import ask
from hive.lab import agent_process
from hive.lab.cluster import remove_pod
from hive.lab.cluster.manifests import Manifests, Object, read_objects, with_defaults
from hive.lab.names import manifests_named, name_option
from hive.lab.node import Lab, LabError, exclusive, need_root
from hive.output import document, output_option, table

APPLIED = "applied-"
"""Prefix of the files of applied objects."""
WITHIN = 60.0
POLICIES = ("NetworkPolicy", "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy")
_SETTLE = 0.02
Known = Mapping[tuple[str, ...], Mapping[str, Any]]
"""Policy objects as an agent has them, by kind, namespace and name."""

files_option = click.option(
    "-f",
    "--filename",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A manifest, YAML or JSON; may be given more than once.",
)


@click.command()
@name_option()
@files_option
@click.option("--wait", is_flag=True, help="Wait until policies hold, and services have what they need.")
def apply(lab: Lab, files: tuple[Path, ...], wait: bool) -> int:
    """Apply objects to a node, or to all nodes of its cluster; the same file or name is replaced.

    Services get an address and, by their selectors, EndpointSlices, as in a cluster. With --wait a policy
    that an agent refuses is reported, and the exit code is 1.
    """
    need_root()
    if not files:
        raise click.UsageError("expected -f FILE")
    refused = 0
    with exclusive():
        manifests = manifests_named(lab)
        for file in files:
            given = read_objects(file)
            if not given:
                raise LabError(f"{file} has no objects; to remove what was applied: hive lab delete")
            objects = with_defaults(given, [one for one, _ in manifests.objects()])
            known = [one for one, name in manifests.objects() if name == _file_of(file)]
            changed = [one for one in objects if one not in known]
            before = {agent: _policies(agent) for agent in manifests.nodes} if wait else {}
            if objects == given:  # unchanged: errors refer to its lines
                manifests.copy(_file_of(file), file.read_text(encoding="utf-8"))
            else:
                manifests.write(_file_of(file).removesuffix(".yaml"), objects)
            _take_out(manifests, partial(_is_replaced, frozenset(map(_key, objects)), _file_of(file)))
            manifests.follow_services()
            for one in objects:
                why = _wait(one, before) if wait and one in changed else ""
                click.echo(f"{_title(one)} {f'refused: {why}' if why else 'applied'}")
                refused += bool(why)
    return 1 if refused else 0


@click.command()
@name_option()
@files_option
@click.argument("kind", default="")
@click.argument("object_name", default="", metavar="[NAME]")
@click.option("-n", "--namespace", default="default", show_default=True, help="Of the object.")
@click.option("--wait", is_flag=True, help="Wait until no agent has the policies any more.")
def delete(
    lab: Lab, files: tuple[Path, ...], kind: str, object_name: str, namespace: str, wait: bool
) -> None:
    """Remove objects that were applied, by their file or by KIND and NAME; or a pod of the lab."""
    need_root()
    if bool(files) == bool(kind and object_name):
        raise click.UsageError("expected -f FILE, or KIND and NAME")
    with exclusive():
        manifests = manifests_named(lab)
        if _is({"kind": "Pod"}, kind) and kind:
            _delete_pod(manifests, object_name)
            return
        meant = _Meant(frozenset(map(_file_of, files)), kind, namespace, object_name)
        removed = _take_out(manifests, meant.__call__)
        manifests.follow_services()
        if not removed:
            what = ", ".join(str(file) for file in files) or f"{kind} {object_name}"
            raise LabError(f"nothing was applied of {what}: see hive lab get")
        for one in removed:
            if wait and one["kind"] in POLICIES:
                _until(partial(_is_forgotten, manifests, one), one)
            click.echo(f"{_title(one)} deleted")


@click.command()
@name_option()
@click.argument("kind", default="")
@click.argument("object_name", default="", metavar="[NAME]")
@output_option
def get(lab: Lab, kind: str, object_name: str, output: str) -> None:
    """Show the objects that a node, and the others of its cluster, know: all, those of a KIND, one."""
    need_root()
    found = [
        (one, file)
        for one, file in manifests_named(lab).objects()
        if _is(one, kind) and object_name in {"", one["metadata"]["name"]}
    ]
    if object_name and not found:
        raise LabError(f"there is no {kind} {object_name}")
    if output == "yaml":
        import yaml

        click.echo(yaml.safe_dump_all([one for one, _ in found], sort_keys=False), nl=False)
        return
    if (text := document([one for one, _ in found], output)) is not None:
        click.echo(text)
        return
    lines = [("KIND", "NAMESPACE", "NAME", "FILE")]
    lines += [
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"], file)
        for one, file in found
    ]
    for line in table(lines):
        click.echo(line)


def _delete_pod(manifests: Manifests, name: str) -> None:
    for node in manifests.nodes:
        if name in node.pods():
            remove_pod(manifests, node, name)
            click.echo(f"pod/{name} deleted")
            return
    raise LabError(f"no node has a pod named {name}")


class _Meant(NamedTuple):
    """Selects applied objects: those of files, or one by its name."""

    files: frozenset[str]
    kind: str
    namespace: str
    name: str

    def __call__(self, one: Object, file: str) -> bool:
        if self.files:
            return file in self.files
        names = _keys(one, self.namespace, self.name)
        return file.startswith(APPLIED) and _is(one, self.kind) and _key(one) in names


def _is_replaced(keys: frozenset[tuple[str, ...]], by: str, one: Object, file: str) -> bool:
    """Return whether an applied object has been applied again from another file."""
    return file.startswith(APPLIED) and file != by and _key(one) in keys


def _take_out(manifests: Manifests, is_meant: Callable[[Object, str], bool]) -> list[Object]:
    """Remove objects from their files, and empty files; return the removed objects."""
    left: dict[str, list[Object]] = {}
    removed: list[tuple[Object, str]] = []
    for one, file in manifests.objects():
        if is_meant(one, file):
            removed.append((one, file))
        else:
            left.setdefault(file, []).append(one)
    for file in {file for _, file in removed}:
        name = file.removesuffix(".yaml")
        if file in left:
            manifests.write(name, left[file])
        else:
            manifests.remove(name)
    return [one for one, _ in removed]


# Waiting for agents


def _wait(one: Object, before: Mapping[Lab, Known]) -> str:
    """Wait until the agents have processed a new object; return why one refuses it. Raises LabError."""
    if one["kind"] in POLICIES:
        for node, known in before.items():
            _until(partial(_is_taken, node, known, one), one)
            row = _policies(node).get(_key(one))
            if row is None:  # no agent runs
                continue
            if not row["valid"]:
                return ": ".join(filter(None, (row.get("path"), row["message"])))
            _until(partial(_is_realized, node, row["revision"]), one)
    elif one["kind"] == "Service":
        spec = one.get("spec") or {}
        labels = one["metadata"].get("labels") or {}
        elsewhere = {HEADLESS, PROXY_NAME} & labels.keys()  # no proxy serves it, or another one
        if spec.get("type") != "ExternalName" and spec.get("clusterIP") != "None" and not elsewhere:
            for node in before:
                _until(partial(_is_served, node, one), one)
    return ""


def _until(condition: Callable[[], bool], one: Object) -> None:
    deadline = time.monotonic() + WITHIN
    while not condition():
        if time.monotonic() > deadline:
            where = "policy list" if one["kind"] in POLICIES else "service list"
            raise LabError(
                f"{_title(one)} did not take hold within {WITHIN:g} s: see hive status, hive {where}"
            )
        time.sleep(_SETTLE)


def _policies(node: Lab) -> Known:
    """Return the policy objects of a node's agent, by kind, namespace and name."""
    rows = _ask(node, "/statedb/dump/policies", {"policies": []})["policies"]
    found = (row["obj"] for row in rows)
    return {(one["kind"], one["namespace"], one["name"]): one for one in found}


def _is_taken(node: Lab, known: Known, one: Object) -> bool:
    """Return whether the agent has added or changed a policy."""
    return _policies(node).get(_key(one)) != known.get(_key(one)) or agent_process.running(node) is None


def _is_forgotten(manifests: Manifests, one: Object) -> bool:
    return all(_key(one) not in _policies(node) for node in manifests.nodes)


def _is_realized(node: Lab, revision: int) -> bool:
    endpoints = _ask(node, "/v1/endpoint", [])
    return all(one["status"]["policy"]["realized"].get("policy-revision", 0) >= revision for one in endpoints)


def _is_served(node: Lab, one: Object) -> bool:
    wanted = {"namespace": one["metadata"].get("namespace") or "default", "name": one["metadata"]["name"]}
    for row in _ask(node, "/v1/service", []):
        flags = row["spec"].get("flags") or {}
        if wanted.items() <= flags.items():
            return True
    return agent_process.running(node) is None


def _ask(node: Lab, path: str, nothing: Any) -> Any:
    """Return the answer of a node's agent; ``nothing`` if none runs."""
    pid = agent_process.running(node)
    return ask(path, agent_process.api_socket(pid)) if pid is not None else nothing


# Names


def _file_of(file: Path) -> str:
    return f"{APPLIED}{file.stem}.yaml"


def _title(one: Object) -> str:
    return f"{one['kind'].lower()}/{one['metadata']['name']}"


def _key(one: Object) -> tuple[str, ...]:
    namespace = one["metadata"].get("namespace") or "default"
    return (
        one["kind"],
        "" if one["kind"].startswith("CiliumClusterwide") else namespace,
        one["metadata"]["name"],
    )


def _keys(one: Object, namespace: str, name: str) -> Iterable[tuple[str, ...]]:
    """Return the keys that a name may stand for: in the namespace, or cluster-scoped."""
    return (one["kind"], namespace, name), (one["kind"], "", name)


def _is(one: Object, kind: str) -> bool:
    own = str(one["kind"]).lower()
    return kind.lower() in {"", own, f"{own}s", f"{own[:-1]}ies" if own.endswith("y") else own}
