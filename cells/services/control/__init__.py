"""Services as pods see them: from objects to the maps that the datapath reads.

Source:     the tables of Services, EndpointSlices and Nodes; the table ``frontends`` follows from them.
Reconciler: ``frontends`` in, the maps ``cilium_lb*`` out; their only writer.
Needs:      AgentConfig, Resources, Maps.   Gives: Table[Frontend], Table[ServedFrontend].
Why:        what an earlier agent installed is taken over with its numbers, and goes only once every Service
            and EndpointSlice is known: connections through services outlive a restart. Where no source
            of objects is set, it stays as it is, and the log says so.
"""

from functools import partial
from typing import Final

from anyio import to_thread

from cells.config import AgentConfig
from cells.kubernetes import ENDPOINT_SLICES, NODES, SERVICES, KubernetesSettings, Resources
from cells.services.balancer import LoadBalancer
from cells.services.control.kernel import KernelServices
from cells.services.control.served import ServedFrontend, served_frontends
from cells.services.control.settings import ServiceSettings
from cells.services.control.target import ServiceMaps, ServicesTarget
from cells.services.control.watch import ServiceWatch
from cells.services.model import INTERNAL, PROTOCOLS, Address, Backend, Frontend, LoadBalancerOptions
from lifecycle import Jobs, Logger, Reconciler, Table, Tables, after, config, invoke, minutes, module, provide

__all__ = [
    "INTERNAL",
    "PROTOCOLS",
    "Address",
    "Backend",
    "Frontend",
    "ServedFrontend",
    "ServiceMaps",
    "ServiceSettings",
    "cell",
]

SWEEP: Final = minutes(1)


def options(agent: AgentConfig, settings: ServiceSettings) -> LoadBalancerOptions:
    """What the agent's settings mean for services: pods reach cluster addresses, kube-proxy does the rest."""
    return LoadBalancerOptions(
        enable_ipv4=agent.ipv4,
        enable_ipv6=agent.ipv6,
        kube_proxy_replacement=False,
        enable_session_affinity=settings.enable_session_affinity,
        enable_svc_source_range_check=False,
        enable_health_check_nodeport=False,
        cluster_name=agent.cluster_name,
    )


def frontends() -> Table[Frontend]:
    """The ``frontends`` table: every address that is served, with its backends, by address and scope."""
    return Table("frontends", key=lambda one: one.key)


def watch(
    agent: AgentConfig,
    resources: Resources,
    table: Table[Frontend],
    served: LoadBalancerOptions,
    *,
    jobs: Jobs,
) -> ServiceWatch:
    """Follows the objects, from the start on."""
    found = ServiceWatch(
        lambda: agent.node_name,
        resources.table(SERVICES),
        resources.table(ENDPOINT_SLICES),
        resources.table(NODES),
        table,
        served,
    )
    jobs.one_shot("follow", found.run)
    return found


@after(ServiceWatch)
def reconcile(
    table: Table[Frontend],
    told: Table[ServedFrontend],
    maps: ServiceMaps,
    served: LoadBalancerOptions,
    objects: KubernetesSettings,
    *,
    jobs: Jobs,
    tables: Tables,
    log: Logger,
) -> None:
    """Keep the maps as the table says; without a source of objects, as an earlier agent left them."""
    initial = told.initializer("what the maps hold")
    if not objects.has_source:
        jobs.one_shot("look at what is left", partial(_leave, maps, log))
        return
    target = ServicesTarget(table, LoadBalancer(served), maps, told, initial.done)
    reconciler = Reconciler(table, target, full_every=SWEEP)
    tables.add(reconciler.statuses)
    jobs.observe("reconcile", reconciler)


async def _leave(maps: ServiceMaps, log: Logger) -> None:
    """Nobody says which services there are: removing those that pods use would cut their connections."""
    held = await to_thread.run_sync(maps.dump)
    if held:
        log.warning(
            "services of an earlier agent stay as they are: no source of objects is set"
            " (k8s-api-server, k8s-kubeconfig-path or manifests-dir)",
            entries=len(held),
        )


cell = module(
    "services",
    "Services as pods see them",
    config(ServiceSettings),
    provide(options, frontends, served_frontends, watch, KernelServices.provided),
    invoke(reconcile),
)
