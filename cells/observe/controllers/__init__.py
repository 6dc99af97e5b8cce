"""Controllers: named work that is done again and again, or until it works, by documented rules.

Controller: the rules and counters over the jobs of the hive, which do the scheduling.
Needs:  Jobs, JobMetrics, Health.
Gives:  Controllers: run one, trigger it, remove it, and the status of all.
Why:    operators look for them by name in ``cilium-dbg status`` and in an endpoint's status.
"""

from collections.abc import Iterable

from cells.observe.controllers.controllers import Controllers
from cells.observe.controllers.rules import ControllerStatus, Rules
from cells.observe.metrics import Collector, Family
from lifecycle import Member, module, provide

__all__ = ["ControllerStatus", "Controllers", "Rules", "cell"]


def controller_metrics(controllers: Controllers) -> Member[Collector]:
    """Controllers as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.observe.controllers.metrics import families

        return families(controllers)

    return Collector("controllers", collect)


cell = module("controllers", "Named work with retries and counters", provide(Controllers, controller_metrics))
