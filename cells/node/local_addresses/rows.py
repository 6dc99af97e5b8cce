"""The rows of cilium_lxc: written where they differ, compared as a whole now and then.

For:    LocalAddresses. Needs: Table[LocalAddress], the map. Gives: LocalAddress, LxcRows, LxcMap.
"""

from collections.abc import Collection, Mapping
from typing import Final, Protocol

import msgspec
from anyio import to_thread

from cells.ipam import IPAddress
from cells.maps import LXC_HOST, LxcValue
from lifecycle import BatchFailures, Logger, NotStartedError, ReadTable

HOST: Final = LxcValue(flags=LXC_HOST)
"""What an address of the node itself has in cilium_lxc."""


class LocalAddress(msgspec.Struct, frozen=True):
    """Whose an address of this node is; a row of the table ``local-addresses``."""

    ip: IPAddress
    host: bool
    """Whether the node itself has it; then no endpoint gets its packets."""
    endpoint: int = 0
    """The number of the endpoint that has it, or would have it if the node did not; 0: none."""
    row: LxcValue | None = None
    """What that endpoint has in cilium_lxc."""

    @property
    def value(self) -> LxcValue:
        """What the address has in cilium_lxc."""
        return HOST if self.host or self.row is None else self.row


class LxcMap(Protocol):
    """The map itself. All raise OSError."""

    def dump(self) -> Mapping[IPAddress, LxcValue]:
        """Every row there is; called in a thread, at any time."""
        ...

    def lookup(self, ip: IPAddress) -> LxcValue | None:
        """The address's row."""
        ...

    def update(self, ip: IPAddress, value: LxcValue) -> None:
        """Write the row."""
        ...

    def delete(self, ip: IPAddress) -> None:
        """Remove the row; gone already is fine."""
        ...

    def void_verdicts(self) -> None:
        """Make the datapath evaluate the next packet of every flow again."""
        ...


class LxcRows:
    """A reconciler's target: what the map holds, beside what is claimed."""

    def __init__(self, table: ReadTable[LocalAddress], kernel: LxcMap, log: Logger) -> None:
        self._table = table
        self._kernel = kernel
        self._log = log
        self._left: dict[IPAddress, LxcValue] | None = None

    async def read(self) -> None:
        """Take note of what a former agent left. Raises OSError."""
        self.left(await to_thread.run_sync(self._kernel.dump))

    def left(self, rows: Mapping[IPAddress, LxcValue]) -> None:
        """These rows are what a former agent left."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> dict[IPAddress, LxcValue]:
        """Rows that are not claimed yet; raises NotStartedError before they are known."""
        if self._left is None:
            raise NotStartedError(
                "LocalAddresses was used before the hook 'read the local addresses' ran: depend on it"
            )
        return self._left

    def set(self, ip: IPAddress, value: LxcValue | None) -> None:
        """Have the address's row so, or have none; what is so already is not written. Raises OSError.

        The address may have changed its owner, so cached verdicts are void.
        """
        left = self.leftovers
        if value is not None and ip not in left and ip not in self._table:
            self._kernel.update(ip, value)  # a new pod's: there is nothing to compare with
            if value.is_host:
                self._kernel.void_verdicts()
            return
        present = self._kernel.lookup(ip)
        if present != value:
            if value is None:
                self._kernel.delete(ip)
            else:
                self._kernel.update(ip, value)
            self._kernel.void_verdicts()
        left.pop(ip, None)

    async def dump(self) -> Mapping[IPAddress, LocalAddress]:
        """Every row, as its claim where it is what is claimed."""
        held = await to_thread.run_sync(self._kernel.dump)
        self._left = {ip: value for ip, value in held.items() if ip not in self._table}
        return {ip: self._row(ip, value) for ip, value in held.items()}

    async def put(self, batch: Mapping[IPAddress, LocalAddress]) -> None:
        """Write rows that are not as claimed. Raises BatchError."""
        self._each({ip: row.value for ip, row in batch.items()})

    async def drop(self, batch: Collection[IPAddress]) -> None:
        """Remove unclaimed rows. Raises BatchError."""
        self._each(dict.fromkeys(batch))
        self._log.info("removed unclaimed rows of cilium_lxc", addresses=", ".join(map(str, batch)))

    def _row(self, ip: IPAddress, value: LxcValue) -> LocalAddress:
        row = self._table.get(ip)
        if row is not None and row.value == value:
            return row
        return LocalAddress(ip, value.is_host, value.endpoint_id, None if value.is_host else value)

    def _each(self, values: Mapping[IPAddress, LxcValue | None]) -> None:
        with BatchFailures(OSError) as failures:
            for ip, value in values.items():
                with failures.of(ip):
                    self.set(ip, value)
