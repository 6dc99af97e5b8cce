"""A fake of the kernel's XFRM for tests."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from cells.encryption.ipsec.plan import Refusals
from cells.netlink.connection import NetlinkError
from cells.netlink.network import FwmarkRuleRow, TableRoute
from cells.netlink.xfrm import XfrmPolicy, XfrmState


class KilledError(BaseException):
    """The agent is killed before a change of the kernel."""


class FakeXfrm:
    """XFRM with the semantics of recordings: SPI, address and mark identify a state."""

    def __init__(self, *, esp: bool = True) -> None:
        self.esp = esp
        self.held_states: dict[object, XfrmState] = {}
        self.held_policies: dict[object, XfrmPolicy] = {}
        self.held_rows: set[FwmarkRuleRow | TableRoute] = set()
        self.cut_in = 0
        """The agent is killed before the n-th change from now, 1 being the next; 0: it is not killed."""

    def _change(self) -> None:
        if self.cut_in == 1:
            raise KilledError
        self.cut_in = max(0, self.cut_in - 1)

    async def states(self) -> list[XfrmState]:
        return list(self.held_states.values())

    async def policies(self) -> list[XfrmPolicy]:
        return list(self.held_policies.values())

    async def add_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]:
        return [self._add(one) for one in states]

    def _add(self, one: XfrmState) -> NetlinkError | None:
        if not self.esp:
            return NetlinkError(errno.EPROTONOSUPPORT, f"add {one}", "Requested type not found")
        if one.key in self.held_states:
            return NetlinkError(errno.EEXIST, f"add {one}")
        self._change()
        self.held_states[one.key] = one
        return None

    async def delete_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]:
        for one in states:
            self._change()
            self.held_states.pop(one.key, None)
        return [None for _ in states]

    async def set_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]:
        for one in policies:
            self._change()
            self.held_policies[one.key] = one
        return [None for _ in policies]

    async def delete_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]:
        for one in policies:
            self._change()
            self.held_policies.pop(one.key, None)
        return [None for _ in policies]

    async def rows(self) -> list[FwmarkRuleRow | TableRoute]:
        return list(self.held_rows)

    async def set_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals:
        self.held_rows |= set(rows)
        return {}

    async def remove_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals:
        self.held_rows -= set(rows)
        return {}

    async def remove_routes(self) -> int:
        count = len(self.held_rows)
        self.held_rows.clear()
        return count
