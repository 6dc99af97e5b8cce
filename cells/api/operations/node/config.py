"""GET and PATCH /config: the daemon's settings, and the options that can change while it runs.

Needs: NodeStatus, PolicyEnforcement.   Gives: ConfigOperations.
"""

from __future__ import annotations

from cells.api.models import v1 as models
from cells.api.operations.node import config_mapping
from cells.api.operations.node.node_status import NodeStatus
from cells.api.part import ApiPart, Route
from cells.api.wire import answer, empty, read_body
from cells.endpoint import PolicyEnforcement
from lifecycle import Member
from lifecycle.http import Request, Response


class ConfigOperations:
    """The daemon's configuration."""

    def __init__(self, enforcement: PolicyEnforcement, facts: NodeStatus) -> None:
        self._enforcement = enforcement
        self._facts = facts

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/v1/config", self.get_config),
            Route("PATCH", "/v1/config", self.patch_config),
        ]

    async def get_config(self, _request: Request) -> Response:
        """GET /config; never rate limited: the plugin probes with it twice a second."""
        facts = self._facts
        model = config_mapping.configuration_model(facts.node(), facts.settings(), self._enforcement.now)
        return answer(200, model)

    async def patch_config(self, request: Request) -> Response:
        """PATCH /config: every endpoint's maps follow before the answer; what is unchanged does nothing."""
        body = read_body(request, models.DaemonConfigurationSpec, "configuration")
        try:
            node = self._facts.node()
            wanted, notifications = config_mapping.requested_configuration(
                body, self._enforcement.now, node.notifications
            )
            debug = config_mapping.requested_debug(body, node.debug)
        except ValueError as error:
            return answer(400, str(error))
        if refusal := self._enforcement.refusal(wanted):
            return answer(500, refusal)
        try:
            self._facts.set_notifications(notifications)
        except OSError as error:
            return answer(500, f"the datapath cannot be configured: {error}")
        self._facts.log_debug(debug)
        failed = await self._enforcement.change(wanted)
        if failed:
            return answer(500, f"endpoints {failed} could not follow yet, they are tried again")
        return empty(200)


def part(operations: ConfigOperations) -> Member[ApiPart]:
    """As a part of the API."""
    return ApiPart("config", operations.routes())
