"""What an endpoint is in the kernel and on disk: made, compared, taken away, in the one order that is safe.

For:    EndpointCreation and Endpoints. Needs: EndpointPolicies, Ipcache, the edges, StateFiles.
Gives:  Realization, Undo, REFUSALS.
Source: Cilium 1.17, the order of an endpoint's regeneration and deletion.

The order of every step is such that an agent killed in the middle leaves nothing that a restart cannot tell
from a working endpoint: policy first, the state file last (the creator of the endpoint brings the link up
after that), and the reverse when removing.
"""

from collections.abc import Callable
from typing import Final

from cells.cluster.identity import NoIdentityError
from cells.cluster.ipcache import Ipcache, prefix_of
from cells.endpoint.kernel.edges import EndpointMaps, EndpointPrograms
from cells.endpoint.kernel.ipcache import claims_of, resource_of
from cells.endpoint.state.files import StateFiles
from cells.endpoint.table.model import Endpoint
from cells.endpoint.table.states import Level
from cells.ipam import IpamError
from cells.policy.maps import EndpointPolicies
from lifecycle import HiveError, Logger

REFUSALS: Final = (OSError, HiveError, NoIdentityError, IpamError)
"""What a step of an endpoint's life may raise."""

Step = tuple[str, Callable[[Endpoint], object]]
Undo = list[Step]
"""How to take back what was done, the last step last."""


class Realization:
    """Makes kernel and state file agree with endpoints' rows. All of it is synchronous."""

    def __init__(
        self,
        *,
        maps: EndpointMaps,
        programs: EndpointPrograms,
        ipcache: Ipcache,
        policies: EndpointPolicies,
        files: StateFiles,
        verify_source: bool,
        log: Logger,
    ) -> None:
        self.source_ip_verification = verify_source
        """Whether pods may send from their own addresses only; an endpoint may be exempt."""
        self._maps = maps
        self._programs = programs
        self._ipcache = ipcache
        self._policies = policies
        self._files = files
        self._log = log

    def make(self, endpoint: Endpoint, undo: Undo) -> None:
        """Make all of a new endpoint; each step's opposite goes to ``undo`` before it. Raises REFUSALS."""
        self._realize_policy(endpoint)
        undo.append(("endpoint config", self._maps.drop_config))
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        undo.append(("cilium_lxc", self._maps.drop_lxc))
        self._maps.put_lxc(endpoint)
        undo.append(("cilium_ipcache", self.withdraw))
        self._ipcache.upsert(*claims_of(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, egress_prog=endpoint.datapath.egress_prog)
        undo.append(("state directory", self._forget_state))
        self._files.write(endpoint)

    def rewrite(self, endpoint: Endpoint, level: Level) -> None:
        """Put right what is not as the endpoint's row says. Raises REFUSALS.

        What is right already is not written: a running pod notices nothing.
        """
        self._realize_policy(endpoint)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        if level is Level.POLICY:
            return
        self._maps.put_lxc(endpoint)
        self._ipcache.upsert(*claims_of(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, egress_prog=endpoint.datapath.egress_prog)
        self._files.refresh(endpoint)

    def carry(self, endpoint: Endpoint) -> None:
        """Have the kernel know the endpoint by this row's identity: its peers' policies first, packets last.

        Raises OSError. Where its rules contradict each other the policy it has stays; its build tells.
        """
        try:
            self._realize_policy(endpoint)
        except HiveError as error:
            self._log.warning("policy not realized", endpoint=endpoint.id, error=str(error))
        self._maps.put_lxc(endpoint)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        self._ipcache.upsert(*claims_of(endpoint))

    def withdraw(self, endpoint: Endpoint) -> None:
        """Release its addresses in the maps; raises OSError."""
        self._ipcache.withdraw(resource_of(endpoint.id), map(prefix_of, endpoint.addresses))

    def remove(self, endpoint: Endpoint) -> list[str]:
        """Remove all of it but identity and addresses, whatever becomes of each step; what went wrong."""
        return self.take_back(
            [
                ("state directory", self._forget_state),
                ("policy map", self._release_policy),
                ("endpoint config", self._maps.drop_config),
                ("cilium_ipcache", self.withdraw),
                ("cilium_lxc", self._maps.drop_lxc),
            ],
            endpoint,
        )

    def take_back(self, steps: Undo, endpoint: Endpoint) -> list[str]:
        """Take these steps, the last one first, whatever becomes of each; what went wrong."""
        return [wrong for what, do in reversed(steps) if (wrong := self.quietly(what, do, endpoint))]

    def quietly(self, what: str, do: Callable[..., object], *args: object) -> str:
        """Take one step back; a failure is logged and returned as text, the next step still happens."""
        try:
            do(*args)
        except REFUSALS as error:
            self._log.warning("endpoint left something behind", what=what, error=str(error))
            return f"{what}: {error}"
        return ""

    def _realize_policy(self, endpoint: Endpoint) -> None:
        pod = (endpoint.pod_namespace, endpoint.pod_name)
        self._policies.realize(endpoint.id, endpoint.identity, endpoint.labels, pod)

    def _forget_state(self, endpoint: Endpoint) -> None:
        self._files.remove(endpoint.id)

    def _release_policy(self, endpoint: Endpoint) -> None:
        self._policies.release(endpoint.id)

    def _any_source(self, endpoint: Endpoint) -> bool:
        return endpoint.datapath.disable_sip_verification or not self.source_ip_verification
