"""What an endpoint's status log says, in Cilium's words.

For:   Endpoints and EndpointCreation.   Needs: nothing.   Gives: the sentences.
Source: Cilium 1.17, the reasons of state transitions.
"""

from typing import Final

from cells.endpoint.table.states import State

CREATED: Final = "Endpoint creation"
RESTORED: Final = "Restoring endpoint from previous cilium instance"
STARTING: Final = "Starting endpoint regeneration"
COMPLETED: Final = "Completed endpoint regeneration with no pending regeneration requests"
RELABELLED: Final = "Triggering identity resolution due to updated identity labels"
IDENTIFIED: Final = "Set identity for this endpoint"
NOT_IDENTIFIED: Final = "No identity for the new labels: the endpoint keeps those it has"
DELETED: Final = "the endpoint was deleted before it was made"


def triggered(reason: str) -> str:
    """A build is due."""
    return f"Triggering endpoint regeneration due to {reason}"


def regenerated(reason: str) -> str:
    """A build went well."""
    return f"Successfully regenerated endpoint program (Reason: {reason})"


_INITIAL: Final = "Initial build on endpoint creation"
FIRST_BUILT: Final = regenerated(_INITIAL)
FIRST_BUILD: Final = (
    (IDENTIFIED, State.READY),
    (triggered(_INITIAL), State.WAITING_TO_REGENERATE),
    (STARTING, State.REGENERATING),
)
"""The steps up to the first build, with the state each leads to."""
