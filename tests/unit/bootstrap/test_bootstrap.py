"""Bootstrap durations by scope, summed over hooks, in the log and as metrics."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from cells.agent import agent
from cells.config import AgentConfig
from cells.observe import bootstrap, metrics
from cells.observe.bootstrap import EARLY, OVERALL, SCOPES, Bootstrap, Scopes, families, scopes_of
from cells.observe.health import HealthServer
from lifecycle import Hive, Hook, Lifecycle, Profile, module, provide, supply
from lifecycle.injection import Timing
from lifecycle.process import exposition

DOCUMENTED = {
    *("overall", "earlyInit", "k8sInit", "restore", "healthCheck", "ingressIPAM", "initAPI", "initDaemon"),
    *("cleanup", "bpfBase", "clusterMeshInit", "ipam", "daemonInit", "mapsInit", "workloadsInit", "fqdn"),
    *("enableConntrack", "kvstore", "deleteQueue"),
}


def started(name: str, where: str, took: float, began: float = 0.0) -> Timing:
    """A hook's start."""
    return Timing("start", name, where, began, took)


def test_every_scope_is_one_of_ciliums() -> None:
    assert set(SCOPES.values()) | {OVERALL} <= DOCUMENTED


def test_what_belongs_to_a_scope_is_a_hook_of_the_agent() -> None:
    hooks = {(hook.module.rpartition(".")[2], hook.name) for hook in Hive(agent).graph().hooks}
    modules = {where for where, _ in hooks} | {"metrics"}  # it has a hook when an address is set
    named = {tuple(key.split("/")) for key in SCOPES if "/" in key}
    assert named <= hooks
    assert {key for key in SCOPES if "/" not in key} <= modules


def test_hooks_of_a_scope_add_up() -> None:
    profile = Profile(
        timings=[
            Timing("construct", "Maps", "agent.maps", 0, 0.25),
            started("claim the node", "agent.config", 0.5),
            started("open the maps", "agent.maps", 1),
            started("prepare the policy maps", "agent.maps", 2),
            started("drain the delete queue", "agent.cni-server", 4),
            started("serve cni.sock", "agent.cni-server", 8),
            started("jobs of Nobody", "agent.nobody", 0),
            Timing("stop", "open the maps", "agent.maps", 0, 16),
        ],
        failed=[started("load the datapath", "agent.datapath", 32)],
    )
    assert scopes_of(profile, before=64) == Scopes(
        {EARLY: 64.75, "mapsInit": 3, "deleteQueue": 4, "initAPI": 8}, {"bpfBase": 32}
    )


def test_bootstrap_metrics_have_one_value_per_scope_and_outcome() -> None:
    text = exposition(families(Scopes({"ipam": 0.25, OVERALL: 2}, {"ipam": 1})))
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.type) == ("cilium_agent_bootstrap_seconds", "histogram")
    sums = {
        (sample.labels["scope"], sample.labels["outcome"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_sum")
    }
    assert sums == {("ipam", "success"): 0.25, ("overall", "success"): 2, ("ipam", "fail"): 1}
    assert all(sample.value == 1 for sample in family.samples if sample.name.endswith("_count"))


class Probed(HealthServer):
    """Answers probes once everything has started."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("serve health", self.start))

    async def start(self) -> None: ...


def probed(lifecycle: Lifecycle) -> HealthServer:
    """Where the health cell would be."""
    return Probed(lifecycle)


@pytest.mark.anyio
async def test_a_start_is_logged_in_one_line_and_in_the_timeline() -> None:
    cells = (
        bootstrap.cell,
        metrics.cell,
        module("health", "Health", provide(probed)),
        supply(AgentConfig.__new__(AgentConfig)),
    )
    with structlog.testing.capture_logs() as logged:
        async with Hive(*cells).started() as hive:
            completed = [line for line in logged if line["event"] == "Daemon initialization completed"]
            scopes = hive.get(Bootstrap).scopes().succeeded
            shown = {family.name for family in await hive.get(metrics.Metrics).families()}
            sums = hive.profile.sums
    (line,) = completed
    assert names(line) == names(sums) <= DOCUMENTED
    assert {OVERALL, EARLY, "healthCheck"} <= names(line)
    assert sums[OVERALL] == scopes[OVERALL] >= max(sums.values())
    assert line[OVERALL] == round(sums[OVERALL], 4)
    assert "cilium_agent_bootstrap_seconds" in shown


def names(line: Iterable[str]) -> set[str]:
    """The scopes in it."""
    return set(line) - {"event", "log_level", "module"}
