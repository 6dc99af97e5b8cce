"""Controllers: named work that is done again and again, or until it works, by documented rules.

Controller: the rules and counters over the jobs of the hive, which do the scheduling.
Needs:  Jobs, JobMetrics, Health.
Gives:  Controllers: run one, trigger it, remove it, and the status of all.
Why:    operators look for them by name in ``cilium-dbg status`` and in an endpoint's status.
"""

from cells.controllers.controllers import Controllers
from cells.controllers.rules import ControllerStatus, Rules
from lifecycle import module, provide

__all__ = ["ControllerStatus", "Controllers", "Rules", "cell"]

cell = module("controllers", "Named work with retries and counters", provide(Controllers))
