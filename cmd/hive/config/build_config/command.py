"""``hive build-config``: its command line."""

import os
from pathlib import Path

import click

from hive.config.build_config.cluster import Cluster, ClusterError
from hive.config.build_config.manifests import Manifests
from hive.config.build_config.merge import Overrides, merge
from hive.config.build_config.sources import Found, Source, SourceError, parse_source, read_source
from hive.config.build_config.write import write_directory

NEED_CLUSTER = ("config-map", "cilium-node-config", "node")


@click.command()
@click.option("--dest", default="/tmp/cilium/config-map", show_default=True, help="Directory to write.")  # noqa: S108
@click.option("--node-name", envvar="K8S_NODE_NAME", default="", help="This node. [K8S_NODE_NAME]")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="KIND[:[NAMESPACE/]NAME]",
    help="Source of settings; repeat it or separate several by commas, the last one wins. Kinds: config-map,"
    " cilium-node-config, node, and directory (a mounted ConfigMap).",
)
@click.option(
    "--allow-config-keys", metavar="KEYS", help="The only keys that sources after the first may set."
)
@click.option("--deny-config-keys", metavar="KEYS", help="Keys that sources after the first may not set.")
@click.option(
    "--manifests-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of Kubernetes objects as YAML, to read sources from instead of an API server.",
)
@click.option("--k8s-kubeconfig-path", default="", metavar="FILE", help="A kubeconfig, for the API server.")
@click.option("--k8s-api-server", default="", metavar="URL", help="The API server.")
def command(
    dest: str,
    node_name: str,
    sources: tuple[str, ...],
    allow_config_keys: str | None,
    deny_config_keys: str | None,
    manifests_dir: Path | None,
    k8s_kubeconfig_path: str,
    k8s_api_server: str,
) -> None:
    """Write the agent's configuration directory, one file per setting, from several sources.

    Start the agent with this --config-dir afterwards. The directory is replaced atomically. The API server is
    that of the options, by default that of the pod's cluster.
    """
    if not dest:
        raise click.UsageError("--dest is required: the directory to write")
    namespace = os.environ.get("CILIUM_K8S_NAMESPACE", "")
    listed = [one for word in sources for one in word.split(",") if one]
    try:
        wanted = [parse_source(one, namespace, node_name) for one in listed] or [
            Source("config-map", namespace, "cilium-config"),
            Source("cilium-node-config", namespace, ""),
        ]
        cluster = _cluster(manifests_dir, wanted, node_name, k8s_kubeconfig_path, k8s_api_server)
    except SourceError as error:
        raise click.UsageError(str(error)) from error
    overrides = Overrides(_keys(allow_config_keys), _keys(deny_config_keys))
    try:
        found = [read_source(source, cluster, node_name, _report) for source in wanted]
        later = [one for group in found[1:] for one in group]
        values = merge(found[0], later, overrides, _report)
        write_directory(Path(dest), values, _report)
    except (SourceError, ClusterError, OSError) as error:
        raise click.ClickException(f"Build config failed: {error}") from error
    click.echo(f"wrote {len(values)} settings from {_names(found)} to {dest}")


def _cluster(
    manifests_dir: Path | None, wanted: list[Source], node: str, kubeconfig: str, server: str
) -> Cluster:
    """Return the source of objects. Raises SourceError."""
    if manifests_dir is not None:
        return Manifests(manifests_dir)
    for source in wanted:
        if source.kind == "directory" and not source.name:
            raise SourceError("--source=directory: expected the directory after a colon")
    if not any(source.kind in NEED_CLUSTER for source in wanted):
        return Manifests(Path())
    for source in wanted:
        if source.kind in {"config-map", "cilium-node-config"} and not source.namespace:
            raise SourceError(
                f"{source.title}: expected a namespace, as {source.kind}:NAMESPACE/NAME, or set"
                " CILIUM_K8S_NAMESPACE"
            )
        if source.kind == "node" and not source.name:
            raise SourceError("--source=node: expected the node after a colon, or set K8S_NODE_NAME")
    from cells.kubernetes.settings import KubernetesSettings
    from hive.config.build_config.api_server import ApiServer

    settings = KubernetesSettings(k8s_kubeconfig_path=kubeconfig, k8s_api_server=server)
    return ApiServer(settings, wanted, node, _report)


def _keys(text: str | None) -> frozenset[str] | None:
    """Return the keys of a list; an empty list restricts nothing, as in Cilium."""
    return frozenset((text or "").replace(",", " ").split()) or None


def _names(found: list[list[Found]]) -> str:
    return ", ".join(one.source.title for group in found for one in group if one.values) or "no source"


def _report(line: str) -> None:
    click.echo(f"hive: {line}", err=True)
