"""Reports in the status of Cilium's policies whether they are valid.

Controller: CiliumNetworkPolicies and CiliumClusterwideNetworkPolicies in, the table ``policy-verdicts`` out:
            what an object does not say yet.
Reconciler: that table in, conditions of type Valid out.
Needs:      ClusterAPI, ClusterObjects, OperatorOptions, PolicySettings.   Gives: PolicyVerdicts.
Why:        users see it in the object, and ``kubectl get cnp`` shows it as a column. The code
            that judges is that of the agents; one operator writes, not every node.
"""

from typing import Final

from cells.operator.api_server import ClusterAPI
from cells.operator.policies.settings import PolicySettings
from cells.operator.policies.verdicts import PolicyVerdict, PolicyVerdicts
from cells.operator.policies.writer import ConditionWriter
from lifecycle import Jobs, Reconciler, Table, config, invoke, minutes, module, provide

__all__ = ["PolicySettings", "PolicyVerdict", "PolicyVerdicts", "cell"]

AGAIN: Final = minutes(1)


def policy_verdicts() -> Table[PolicyVerdict]:
    """What policies do not say yet, by kind, namespace and name."""
    return Table("policy-verdicts", key=lambda one: (one.kind, one.namespace, one.name))


def write(server: ClusterAPI, rows: Table[PolicyVerdict], verdicts: PolicyVerdicts, jobs: Jobs) -> None:
    """Have verdicts written, where there are any."""
    if verdicts.active:
        writer = ConditionWriter(server)
        jobs.observe("write", Reconciler(rows, writer, full_every=AGAIN, put_early=True))


cell = module(
    "policies",
    "Conditions of policies",
    config(PolicySettings),
    provide(policy_verdicts, PolicyVerdicts),
    invoke(write),
)
