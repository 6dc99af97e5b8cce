"""Controllers to the wire: of the node in GET /healthz, of an endpoint in its status.

Needs: ControllerStatus.   Gives: controller, NEVER.
"""

from __future__ import annotations

from cells.api.models import v1 as models
from cells.api.operations.endpoints.mapping import rfc3339
from cells.observe.controllers import ControllerStatus
from lifecycle import Duration

NEVER = "0001-01-01T00:00:00.000Z"
"""The time of what has not happened: Go's zero time."""


def controller(status: ControllerStatus) -> models.ControllerStatus:
    """One controller."""
    return models.ControllerStatus(
        name=status.name,
        uuid=status.uuid,
        configuration=models.ControllerConfiguration(
            error_retry=status.retries,
            error_retry_base=str(Duration(status.retry_base)),
            interval=str(Duration(status.interval)),
        ),
        status=models.ControllerCounts(
            success_count=status.successes,
            last_success_timestamp=timestamp(status.last_success),
            failure_count=status.failures,
            last_failure_timestamp=timestamp(status.last_failure),
            consecutive_failure_count=status.failures_in_a_row,
            last_failure_msg=status.last_error,
        ),
    )


def timestamp(seconds: float | None) -> str:
    """The time as text; of the year 1, where it never came."""
    return NEVER if seconds is None else rfc3339(seconds)
