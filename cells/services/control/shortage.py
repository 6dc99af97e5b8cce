"""What of services has no room in the maps, for who asks how the agent is.

Gives: Shortage, MapFullError; its part of the agent's verdict and of the metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cells.observe.health import Dependency, State
from cells.observe.metrics import Collector, Family, gauge
from cells.services.model import FrontendKey
from lifecycle import HiveError, Member


class MapFullError(HiveError):
    """A map has no room for another entry."""


class Shortage:
    """The frontends that found no room when they were last tried."""

    def __init__(self) -> None:
        self._missing: dict[FrontendKey, str] = {}

    def __len__(self) -> int:
        return len(self._missing)

    def note(self, tried: Iterable[FrontendKey], failures: Mapping[FrontendKey, Exception]) -> None:
        """What became of some of them."""
        for key in tried:
            error = failures.get(key)
            if isinstance(error, MapFullError):
                self._missing[key] = str(error)
            else:
                self._missing.pop(key, None)

    def state(self) -> tuple[State, str]:
        """Warning while something is missing: what is served goes on, and no restart would help."""
        if not self._missing:
            return "Ok", ""
        count = len(self._missing)
        what = "1 frontend is" if count == 1 else f"{count} frontends are"
        return (
            "Warning",
            f"{what} not served, or not by all backends: {next(reversed(self._missing.values()))}",
        )


def dependency(shortage: Shortage) -> Member[Dependency]:
    """The room for services as something that the agent needs."""
    return Dependency("Load balancing", shortage.state)


def metrics(shortage: Shortage) -> Member[Collector]:
    """How much is missing."""

    async def collect() -> Iterable[Family]:
        text = "Frontends that are not served as they should be, as a map is full."
        return [gauge("hive_services_without_room", text, len(shortage))]

    return Collector("services", collect)
