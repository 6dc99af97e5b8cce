"""Retries regenerations that failed.

For:   Regenerations, Endpoints.   Needs: Controllers.   Gives: RegenerationRecovery.
Source: Cilium 1.17, regeneration recovery: after n x 2 s, linear.
"""

from collections.abc import Awaitable, Callable

from cells.observe.controllers import Controllers, Rules

BACKOFF = 2.0
"""Seconds by which the wait before each further attempt grows."""


class RegenerationError(Exception):
    """Raised when an endpoint could not be built once more."""


def controllers_of(endpoint_id: int) -> str:
    """The owner of the endpoint's controllers."""
    return f"endpoint-{endpoint_id}"


class RegenerationRecovery:
    """A controller for each endpoint whose build failed: ``endpoint-<id>-regeneration-recovery``."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers
        self._recovering: set[int] = set()
        """Endpoints whose last attempt did not work, or is under way."""
        self._recovered: set[int] = set()
        """Endpoints that have the controller: all that ever needed it."""

    def recover(self, endpoint_id: int, attempt: Callable[[int], Awaitable[str]]) -> None:
        """Have ``attempt`` made now, and after 2, 4, 6 … seconds, until it says that nothing is wrong."""
        if endpoint_id in self._recovering:
            return
        self._recovering.add(endpoint_id)
        self._recovered.add(endpoint_id)

        async def retry() -> None:
            wrong = await attempt(endpoint_id)
            if wrong:
                raise RegenerationError(f"regeneration recovery failed: {wrong}")
            self._recovering.discard(endpoint_id)

        name = f"endpoint-{endpoint_id}-regeneration-recovery"
        rules = Rules(retry_base=BACKOFF)
        self._controllers.update(name, retry, rules, owner=controllers_of(endpoint_id))

    def gone(self, endpoint_id: int) -> None:
        """The endpoint is no more: nothing is tried for it any longer."""
        if endpoint_id in self._recovered:
            self._recovered.discard(endpoint_id)
            self._recovering.discard(endpoint_id)
            self._controllers.remove_of(controllers_of(endpoint_id))
