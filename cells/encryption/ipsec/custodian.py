"""The custodian of IPsec's keys: the key in force, those it has replaced, and what the kernel has of them.

Reconciler: what :mod:`cells.encryption.ipsec.plan` plans in, XFRM out.
Why:        a key is replaced while packets encrypted with the one before are on their way: what it made stays
            for a while. Source: Cilium 1.17, its IPsec key custodian.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from cells.encryption.ipsec.keys import IpsecKey, IpsecKeyError, read_keys
from cells.encryption.ipsec.plan import IpsecPlan, is_ours, node_of, spi_of
from cells.netlink.connection import NetlinkError
from cells.netlink.xfrm import XfrmPolicy, XfrmState
from lifecycle import BatchError, HiveError

__all__ = ["KeyRing", "XfrmEdge", "XfrmTarget"]

XfrmObject = XfrmState | XfrmPolicy
XfrmKey = tuple[object, ...]


class KeyRing:
    """The key in force, and since when others are not. Shows no key in any text."""

    def __init__(self, retained: float, now: Callable[[], float]) -> None:
        """``retained``: seconds that states of a replaced key stay."""
        self._retained = retained
        self._now = now
        self._replaced: dict[int, float] = {}
        self.current: IpsecKey | None = None

    @property
    def spi(self) -> int:
        """Of the key in force; 0: there is none yet."""
        return self.current.spi if self.current is not None else 0

    def load(self, text: str) -> bool:
        """Put the last key of a key file in force; whether that is another than before.

        Raises IpsecKeyError for a file with a wrong line; keys before that line count.
        """
        try:
            keys, fault = read_keys(text, self.current), None
        except IpsecKeyError as error:
            keys, fault = error.before, error
        before = self.current
        for key in keys:
            if self.current is not None:
                self._replaced[self.current.spi] = self._now()
            self._replaced.pop(key.spi, None)
            self.current = key
        if fault is not None:
            raise fault
        return self.current != before

    def retains(self, spi: int) -> bool:
        """Whether states of this SPI stay though its key is not in force. One never seen counts from now."""
        if not spi or spi == self.spi:
            return False
        return (
            self.current is None or self._now() - self._replaced.setdefault(spi, self._now()) < self._retained
        )

    def next_end(self) -> float | None:
        """Seconds until the next replaced key's states go; None: no key has been replaced."""
        ends = [since + self._retained - self._now() for since in self._replaced.values()]
        return min((each for each in ends if each > 0), default=None)


class XfrmEdge(Protocol):
    """The kernel's states and policies. Lists raise NetlinkError, the rest returns what was refused."""

    async def states(self) -> list[XfrmState]: ...

    async def policies(self) -> list[XfrmPolicy]: ...

    async def add_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]: ...

    async def delete_states(self, states: Sequence[XfrmState]) -> list[NetlinkError | None]: ...

    async def set_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]: ...

    async def delete_policies(self, policies: Sequence[XfrmPolicy]) -> list[NetlinkError | None]: ...


class XfrmTarget:
    """XFRM as a reconciler's target. What others made is not seen, nor what is to stay for a while.

    States come before the policies that need them: a policy without its state blocks what it takes.
    """

    def __init__(self, kernel: XfrmEdge, ring: KeyRing, planned: Callable[[], IpsecPlan]) -> None:
        self._kernel = kernel
        self._ring = ring
        self._planned = planned
        self._there: dict[XfrmKey, XfrmObject] = {}

    async def observe(self) -> Mapping[XfrmKey, XfrmObject]:
        """What there is of ours. Raises NetlinkError."""
        found: list[XfrmObject] = [*await self._kernel.states(), *await self._kernel.policies()]
        self._there = {one.key: one for one in found if is_ours(one)}
        return {key: one for key, one in self._there.items() if not self._stays(one)}

    def _stays(self, one: XfrmObject) -> bool:
        """Whether it is of a key that was replaced lately, of a node that stays as it is, or of all nodes."""
        planned = self._planned()
        if one.mark is None:
            return bool(planned.policies)
        node, spi = node_of(one.mark), one.spi if isinstance(one, XfrmState) else spi_of(one)
        return node in planned.held or (node in planned.nodes and self._ring.retains(spi))

    def matches(self, row: XfrmObject, observed: XfrmObject) -> bool:
        """Whether it is there with its keys and marks."""
        return row == observed

    async def put(self, batch: Mapping[XfrmKey, XfrmObject]) -> None:
        """Add states, in place of those that have their SPI and mark, then policies. Raises BatchError."""
        failures: dict[XfrmKey, Exception] = {}
        states = [one for one in batch.values() if isinstance(one, XfrmState)]
        taken = self._note(states, await self._kernel.add_states(states), failures, errno.EEXIST)
        if taken:
            self._note(taken, await self._kernel.delete_states(taken), failures)
            self._note(taken, await self._kernel.add_states(taken), failures)
        have = {_way(one) for one in self._there.values() if isinstance(one, XfrmState)}
        policies = []
        for one in batch.values():
            if not isinstance(one, XfrmPolicy):
                continue
            if one.block or one.mark is None or _way_of(one) in have:
                policies.append(one)
            else:
                failures[one.key] = HiveError(f"{one} waits for its state")
        self._note(policies, await self._kernel.set_policies(policies), failures)
        if failures:
            raise BatchError(failures)

    def _note(
        self,
        objects: Sequence[XfrmObject],
        results: Iterable[NetlinkError | None],
        failures: dict[XfrmKey, Exception],
        again: int = 0,
    ) -> list[XfrmState]:
        """Note what was refused, and what is there now; gives states that were refused with ``again``."""
        refused = []
        for one, error in zip(objects, results, strict=True):
            if error is None:
                self._there[one.key] = one
            elif error.errno == again and isinstance(one, XfrmState):
                refused.append(one)
            else:
                failures[one.key] = error
        return refused

    async def drop(self, batch: Collection[XfrmKey]) -> None:
        """Remove them, policies first: packets they have taken are blocked then. Raises BatchError."""
        failures: dict[XfrmKey, Exception] = {}
        found = [self._there[key] for key in batch if key in self._there]
        policies = [one for one in found if isinstance(one, XfrmPolicy)]
        states = [one for one in found if isinstance(one, XfrmState)]
        self._note(policies, await self._kernel.delete_policies(policies), failures)
        self._note(states, await self._kernel.delete_states(states), failures)
        for key in batch:
            if key not in failures:
                self._there.pop(key, None)
        if failures:
            raise BatchError(failures)


def _way(state: XfrmState) -> tuple[object, ...]:
    return state.source, state.destination, state.spi, state.mark


def _way_of(policy: XfrmPolicy) -> tuple[object, ...]:
    template = policy.templates[0]
    return template.source, template.destination, template.spi, policy.mark
