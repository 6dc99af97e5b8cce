"""What clients are told of a module that does not work."""

import pytest

from cells.api.status_mapping import controller, trouble
from lifecycle import HealthStatus


def degraded(message: str, error: str | None) -> HealthStatus:
    return HealthStatus("agent.ipam", "degraded", message, 1_700_000_000.5, error)


@pytest.mark.parametrize(
    ("message", "error", "told"),
    [
        ("disk full", None, "disk full"),
        ("cannot write: disk full", "OSError: disk full", "cannot write: disk full"),
        ("failed 3 times", "OSError: disk full", "failed 3 times: OSError: disk full"),
        ("", "OSError: disk full", "OSError: disk full"),
    ],
)
def test_an_error_is_told_once(message: str, error: str | None, told: str) -> None:
    assert trouble(degraded(message, error)) == told


def test_a_degraded_module_is_a_failing_controller() -> None:
    shown = controller(degraded("disk full", None))
    assert shown.name == "agent.ipam"
    assert shown.status is not None
    assert shown.status.consecutive_failure_count == 1
    assert shown.status.last_failure_timestamp == "2023-11-14T22:13:20.500Z"


def test_a_module_that_is_well_is_a_healthy_controller() -> None:
    shown = controller(HealthStatus("agent.ipam", "ok", "fine", 1_700_000_000.5))
    assert shown.status is not None
    assert shown.status.consecutive_failure_count == 0
    assert shown.status.last_success_timestamp == "2023-11-14T22:13:20.500Z"
