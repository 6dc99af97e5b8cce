"""Claims of addresses: by the node and by endpoints, in the map at once.

For:    HostIPSync, endpoints, their restore. Needs: Table[LocalAddress], LxcRows. Gives: LocalAddresses.

A claim is in the map when the call returns: that of a pod's address must be, before its link comes up. The
sweep is for what others changed, what the kernel refused, and what a former agent left.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import structs

from cells.ipam import IPAddress
from cells.maps import LxcValue
from cells.node.local_addresses.rows import LocalAddress, LxcRows
from lifecycle import Logger, Table


class LocalAddresses:
    """Whose every address of this node is.

    A source that has claims from the start announces itself by ``table.initializer()`` in its constructor.
    Until all of them are done, no row of the map goes for want of a claim.
    """

    def __init__(
        self,
        table: Table[LocalAddress],
        rows: LxcRows,
        log: Logger,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        """``refused`` is called when the kernel refused a row: a sweep is due."""
        self.table = table
        """The claims that count, by address."""
        self._rows = rows
        self._log = log
        self._refused = refused

    @property
    def leftovers(self) -> Mapping[IPAddress, LxcValue]:
        """Rows of the map that are not claimed yet; raises NotStartedError before the map was read."""
        return self._rows.leftovers

    def put_endpoint(self, ips: Iterable[IPAddress], value: LxcValue) -> None:
        """The endpoint of this value has the addresses. Raises OSError: then the claims are as they were."""
        rows = []
        for ip in ips:
            known = self.table.get(ip)
            row = LocalAddress(ip, known is not None and known.host, value.endpoint_id, value)
            self._write(ip, row.value)
            rows.append(row)
        with self.table.txn() as table:
            for row in rows:
                table.put(row)

    def drop_endpoint(self, ip: IPAddress, endpoint_id: int) -> None:
        """The endpoint has the address no more; another endpoint that has it by now keeps it.

        Raises OSError when the kernel refuses: the claim is gone, the row follows with the next sweep.
        """
        known = self.table.get(ip)
        if known is None:
            left = self.leftovers.get(ip)
            if left is not None and left.endpoint_id == endpoint_id:
                self._write(ip, None)
        elif known.row is not None and known.endpoint == endpoint_id:
            self._remove(LocalAddress(ip, known.host))

    def keep(self, ips: Iterable[IPAddress]) -> None:
        """The endpoints that have these addresses in the map keep them, as a former agent wrote it.

        Rows of the node, and addresses without a row, are left out. The map is not written.
        """
        with self.table.txn() as table:
            for ip in ips:
                left = self.leftovers.get(ip)
                if left is not None and not left.is_host:
                    table.put(LocalAddress(ip, False, left.endpoint_id, left))
                    self._rows.leftovers.pop(ip)

    def put_host(self, ip: IPAddress) -> None:
        """The node itself has the address. Raises OSError: then the claim is as it was."""
        known = self.table.get(ip)
        if (loses := self._endpoint_of(ip)) is not None:
            text = "an address of this node belonged to an endpoint, which loses it"
            self._log.warning(text, ip=str(ip), endpoint=loses)
        row = LocalAddress(ip, True) if known is None else structs.replace(known, host=True)
        self._write(ip, row.value)
        self.table.put(row)

    def drop_host(self, ip: IPAddress) -> None:
        """The node has the address no more; an endpoint that claims it has it now.

        Raises OSError when the kernel refuses: the claim is gone, the row follows with the next sweep.
        """
        known = self.table.get(ip)
        if known is not None and known.host:
            self._remove(structs.replace(known, host=False))

    def _endpoint_of(self, ip: IPAddress) -> int | None:
        """The endpoint that gets the address's packets now."""
        known = self.table.get(ip)
        if known is not None:
            return None if known.host or known.row is None else known.endpoint
        left = self.leftovers.get(ip)
        return None if left is None or left.is_host else left.endpoint_id

    def _remove(self, row: LocalAddress) -> None:
        """Leave what is left of the claims: ``row``, or nothing."""
        claimed = row.host or row.row is not None
        try:
            self._write(row.ip, row.value if claimed else None)
        finally:
            with self.table.txn() as table:
                if claimed:
                    table.put(row)
                else:
                    table.delete(row.ip)

    def _write(self, ip: IPAddress, value: LxcValue | None) -> None:
        try:
            self._rows.set(ip, value)
        except OSError:
            self._refused()
            raise
