"""One of several operators is the leader: it works, the others wait for its lease.

Controller: the lease in, the leader's hive started and stopped.
Needs:      ClusterAPI, OperatorOptions, LeaderSettings, LeaderHive.   Gives: Leadership, LeaderHive.
Why:        what the leader runs is a hive of its own: it starts with leadership, and is stopped before the
            lease is let go of.
"""

from cells.operator.leader.leadership import LeaderHive, LeaderSettings, Leadership
from lifecycle import after, config, invoke, module, provide

__all__ = ["LeaderHive", "LeaderSettings", "Leadership", "cell"]


@after(Leadership)
def lead() -> None:
    """Take part in the election."""


cell = module(
    "election",
    "Election of the leader",
    config(LeaderSettings),
    provide(Leadership),
    invoke(lead),
)
