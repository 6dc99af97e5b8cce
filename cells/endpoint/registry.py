"""Which endpoints there are, under which names, and what happened to each.

For:   Endpoints.   Needs: Table[Endpoint].   Gives: Registry.
Source: Cilium 1.17, endpoint states and names.
"""

from collections.abc import Iterable
from dataclasses import replace

from cells.endpoint.lookup import address_name, names_of, parse_id
from cells.endpoint.model import Endpoint, EndpointError, IPAddress
from cells.endpoint.states import Code, State, StatusLog, Subject, Verdict, displayed, judge
from lifecycle import Logger, Table


class Registry:
    """The ``endpoints`` table with its indexes and the status logs, kept together."""

    def __init__(self, table: Table[Endpoint], log: Logger) -> None:
        self.table = table
        self._log = log
        self._by_name: dict[str, int] = {}
        self._by_container: dict[str, tuple[int, ...]] = {}
        self._status: dict[int, StatusLog] = {}

    def get(self, endpoint_id: int) -> Endpoint | None:
        """The endpoint with this number."""
        return self.table.get(endpoint_id)

    def lookup(self, id_text: str) -> Endpoint | None:
        """The endpoint of an id such as ``12`` or ``ipv4:10.0.1.77``; None if there is none.

        Raises EndpointError 400 for an id that cannot be understood.
        """
        wanted = parse_id(id_text)
        return self.table.get(wanted) if isinstance(wanted, int) else self.named(wanted)

    def named(self, name: str) -> Endpoint | None:
        """The endpoint registered under ``prefix:rest``."""
        number = self._by_name.get(name)
        return None if number is None else self.table.get(number)

    def by_container(self, container_id: str) -> list[Endpoint]:
        """All endpoints of a container."""
        numbers = self._by_container.get(container_id, ())
        return [endpoint for number in numbers if (endpoint := self.table.get(number)) is not None]

    def check_unused(self, attachment: str, addresses: Iterable[IPAddress]) -> None:
        """Raise EndpointError 400 when an endpoint has the attachment id ("" is nobody's) or an address."""
        if attachment and f"cni-attachment-id:{attachment}" in self._by_name:
            raise EndpointError(400, f"endpoint for CNI attachment ID {attachment} already exists")
        for name in map(address_name, addresses):
            if name in self._by_name:
                raise EndpointError(400, f"IP {name} is already in use")

    def add(self, endpoint: Endpoint) -> StatusLog:
        """Make the endpoint visible; returns its new, empty status log."""
        number = endpoint.id
        status = self._status[number] = StatusLog()
        for name in names_of(endpoint):
            self._by_name[name] = number
        if endpoint.container_id:
            others = self._by_container.get(endpoint.container_id, ())
            self._by_container[endpoint.container_id] = (*others, number)
        self.put(endpoint)
        return status

    def put(self, endpoint: Endpoint) -> None:
        """Replace the row of an endpoint whose names have not changed."""
        with self.table.txn() as rows:
            rows.put(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Nobody finds the endpoint any more. A name that a later endpoint has taken stays with that one."""
        for name in names_of(endpoint):
            if self._by_name.get(name) == endpoint.id:
                del self._by_name[name]
        others = tuple(n for n in self._by_container.get(endpoint.container_id, ()) if n != endpoint.id)
        if others:
            self._by_container[endpoint.container_id] = others
        else:
            self._by_container.pop(endpoint.container_id, None)
        with self.table.txn() as rows:
            rows.delete(endpoint.id)
        self._status.pop(endpoint.id, None)

    def status(self, endpoint_id: int) -> StatusLog:
        """What happened to the endpoint; an empty log for one that does not exist."""
        status = self._status.get(endpoint_id)
        return StatusLog() if status is None else status

    def shown_state(self, endpoint: Endpoint) -> State:
        """The state as the API shows it: ``not-ready`` when ready but the last thing went wrong."""
        return displayed(endpoint.state, self.status(endpoint.id))

    def set_state(self, endpoint_id: int, state: State, reason: str, *, builder: bool = False) -> bool:
        """Move the endpoint to ``state`` if that is allowed; the status log says why, or why not.

        ``builder`` asks on behalf of a regeneration, which has transitions of its own.
        """
        endpoint = self.table.get(endpoint_id)
        if endpoint is None:
            return False
        status = self._status[endpoint_id]
        match judge(endpoint.state, state, builder=builder):
            case Verdict.ACCEPTED:
                status.add(Code.OK, Subject.OTHER, reason, state)
                self.put(replace(endpoint, state=state))
                return True
            case Verdict.SKIPPED:
                message = f"Skipped invalid state transition to {state} due to: {reason}"
                status.add(Code.WARNING, Subject.OTHER, message, endpoint.state)
                self._log.info(
                    "Invalid state transition skipped",
                    endpoint=endpoint_id,
                    state=endpoint.state.value,
                    wanted=state.value,
                    reason=reason,
                )
        return False
