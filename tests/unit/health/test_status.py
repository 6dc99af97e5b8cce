"""The agent's overall health, computed from its modules' reports."""

from cells.observe.controllers import ControllerState
from cells.observe.health import Dependency, agent_status, agent_version
from lifecycle import HealthTree


def tree(**levels: str) -> HealthTree:
    """Modules ``agent.<name>`` with these levels."""
    health = HealthTree(clock=lambda: 1000.0)
    health.reporter("agent.quiet")
    for name, level in levels.items():
        health.report(f"agent.{name.replace('__', '.').replace('_', '-')}", level, f"{name} says so")  # type: ignore[arg-type]
    return health


def test_an_agent_with_healthy_modules_is_ok() -> None:
    status = agent_status(tree(ipam="ok", datapath="stopped", cni_config="ok").snapshot())
    assert (status.state, status.message, status.serves, status.degraded) == ("Ok", "", True, ())
    assert status.cni_config is not None
    assert status.cni_config.message == "cni_config says so"


def test_an_agent_with_a_degraded_module_still_serves_and_names_it() -> None:
    status = agent_status(tree(ipam="degraded").snapshot())
    assert (status.state, status.serves) == ("Ok", True)
    assert [module.module for module in status.degraded] == ["agent.ipam"]


def test_a_node_that_gets_no_cni_configuration_fails() -> None:
    status = agent_status(tree(cni_config="degraded").snapshot())
    assert (status.state, status.serves) == ("Failure", False)
    assert status.message == "Could not write CNI config file: cni_config says so"


def test_a_written_and_unwatched_cni_configuration_is_ok() -> None:
    status = agent_status(tree(cni_config="ok", cni_config__write="degraded").snapshot())
    assert (status.state, status.serves) == ("Ok", True)


def test_an_agent_without_a_cni_configuration_omits_it_from_status() -> None:
    assert agent_status(tree(ipam="ok").snapshot()).cni_config is None


def test_the_version_is_that_of_the_package() -> None:
    assert agent_version()[0].isdigit()


def test_stale_probes_are_a_warning_before_anything_else() -> None:
    status = agent_status(tree(cni_config="degraded").snapshot(), stale={"bpf-maps": 1000.0})
    assert (status.state, status.message, status.serves) == ("Warning", "Stale status data", False)


def test_the_store_comes_before_the_cni_configuration() -> None:
    store = Dependency("Kvstore service", lambda: ("Failure", "nobody answers"))
    status = agent_status(tree(cni_config="degraded").snapshot(), dependencies=[store])
    assert (status.state, status.message) == ("Failure", "Kvstore service is not ready: nobody answers")
    assert not status.serves


def test_liveness_succeeds_without_the_kvstore() -> None:
    store = Dependency("Kvstore service", lambda: ("Failure", "nobody answers"))
    status = agent_status(tree(cni_config="ok").snapshot(), dependencies=[store])
    assert (status.state, status.serves) == ("Failure", True)
    assert not agent_status((), stale={"bpf-maps": 1.0}, dependencies=[store]).serves


def test_a_store_that_is_well_or_not_wanted_changes_nothing() -> None:
    found = [Dependency("a", lambda: ("Ok", "")), Dependency("b", lambda: ("Disabled", ""))]
    assert agent_status(tree(ipam="ok").snapshot(), dependencies=found).state == "Ok"


def test_a_failure_shown_by_a_controller_is_reported_once() -> None:
    def known(name: str) -> ControllerState:
        return ControllerState(name, "", "", retries=True, retry_base=1, interval=0)

    modules = tree(ipam="degraded", controllers__sync="degraded", datapath="degraded").snapshot()
    status = agent_status(modules, (known("agent.ipam"), known("sync")))
    assert [module.module for module in status.uncontrolled] == ["agent.datapath"]
