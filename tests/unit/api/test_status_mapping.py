"""The status that clients read of a failed module."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from cells.api.operations.endpoint_models import controller
from cells.api.operations.status import degraded_message, uncontrolled
from cells.observe.controllers import ControllerState
from lifecycle import HealthStatus


def degraded(message: str, error: str | None) -> HealthStatus:
    return HealthStatus("agent.ipam", "degraded", message, 1_700_000_000.5, error)


@pytest.mark.parametrize(
    ("message", "error", "expected"),
    [
        ("disk full", None, "disk full"),
        ("cannot write: disk full", "OSError: disk full", "cannot write: disk full"),
        ("failed 3 times", "OSError: disk full", "failed 3 times: OSError: disk full"),
        ("", "OSError: disk full", "OSError: disk full"),
    ],
)
def test_an_error_is_reported_once(message: str, error: str | None, expected: str) -> None:
    assert degraded_message(degraded(message, error)) == expected


def test_a_module_in_trouble_is_a_failing_controller() -> None:
    shown = uncontrolled(degraded("disk full", None))
    assert shown.name == "agent.ipam"
    assert shown.status is not None
    assert shown.status.consecutive_failure_count == 1
    assert shown.status.last_failure_timestamp == "2023-11-14T22:13:20.500Z"


def test_a_controller_has_its_rules_and_counters() -> None:
    known = ControllerState("sync", "1-2", "", retries=True, retry_base=2.0, interval=90.0, successes=3)
    shown = controller(replace(known, last_success=1_700_000_000.5))
    assert json.loads(msgspec.json.encode(shown)) == {
        "name": "sync",
        "uuid": "1-2",
        "configuration": {"error-retry": True, "error-retry-base": "2s", "interval": "1m30s"},
        "status": {
            "success-count": 3,
            "last-success-timestamp": "2023-11-14T22:13:20.500Z",
            "last-failure-timestamp": "0001-01-01T00:00:00.000Z",
        },
    }
