"""The custodian of IPsec's keys: the key in force, those it has replaced, and what the kernel has of them.

Without enable-ipsec it removes at the start what an agent with it has left: states, policies, rules, routes.
Reconciler: what :mod:`cells.encryption.ipsec.plan` plans in, XFRM out.
Why:        a key is replaced while packets encrypted with the one before are on their way: what it made stays
            for a while. Source: Cilium 1.17, its IPsec key custodian.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Final, Protocol

from anyio import to_thread

from cells.base.addresses import Family
from cells.config import AgentConfig
from cells.datapath.settings import XfrmMarks
from cells.encryption.ipsec.keys import IpsecKey, IpsecKeyError, read_keys
from cells.encryption.ipsec.plan import DECRYPT, ENCRYPT, KIND, IpsecPlan, is_ours, node_of, spi_of
from cells.netlink.connection import NetlinkError
from cells.netlink.network import Marked, clear_table, remove_marked
from cells.netlink.xfrm import XfrmKernel, XfrmMark, XfrmPolicy, XfrmState
from lifecycle import (
    BatchError,
    HiveError,
    Hook,
    Lifecycle,
    Logger,
    Settings,
    UsageError,
    after,
    config,
    invoke,
    module,
    provide,
    provide_private,
    refuse,
)

__all__ = ["IpsecCustodian", "IpsecSettings", "KeyRing", "XfrmEdge", "XfrmTarget", "cell"]

TABLE: Final = 200
"""The routing table of packets that are to be encrypted, or are decrypted."""
FAMILIES: Final = (AF_INET, AF_INET6)
TRIAL: Final = {
    Family.IPV4: (ip_address("192.0.2.1"), ip_address("192.0.2.2")),
    Family.IPV6: (ip_address("2001:db8::1"), ip_address("2001:db8::2")),
}
"""Addresses of nobody's (RFC 5737, RFC 3849), for a state that shows whether the kernel has what it needs."""
NOT_BUILT: Final = "not supported yet: the agent publishes no key, and keeps no states in the kernel"
BESIDES: Final = f"enable-ipsec=true is {NOT_BUILT}"


class IpsecSettings(Settings, frozen=True):
    """Settings of IPsec."""

    enable_ipsec: bool = False
    """Encrypt what pods send to pods of other nodes (RFC 4303). Not supported yet: refused at the start, with
    what the kernel lacks for it. Without it, what an agent with it has left in the kernel is removed."""

    ipsec_key_file: str = ""
    """The file of IPsec's keys, as a Secret mounts it: a line is "SPI algorithm key bits". It is read at the
    start with enable-ipsec."""

    enable_ipsec_encrypted_overlay: bool = False
    """Encrypt packets of the tunnel instead of those in it: refused with enable-ipsec."""

    encrypt_interface: str = ""
    """Devices whose packets are encrypted, where they are not found: refused with enable-ipsec."""

    def validate(self) -> None:
        """Refuse what is not served beside enable-ipsec; raises ValueErrors of one line."""
        if self.enable_ipsec:
            refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if not self.ipsec_key_file:
            yield "enable-ipsec=true needs ipsec-key-file: set it to the file of keys"
        if self.enable_ipsec_encrypted_overlay:
            yield "enable-ipsec-encrypted-overlay=true: not supported, expected false"
        if self.encrypt_interface:
            yield f"encrypt-interface={self.encrypt_interface}: not supported, leave it unset"


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

    async def remove_routes(self) -> int: ...


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


class KernelIpsec(XfrmKernel):
    """This node's: the real :class:`XfrmEdge`."""

    async def remove_routes(self) -> int:
        """Remove rules for marked packets, and the table they ask; how many of both there were.

        A table that no such rule asks is another program's. Raises NetlinkError, OSError.
        """
        return await to_thread.run_sync(_remove_routes)


def _remove_routes() -> int:
    marks = [Marked(kind, KIND, TABLE, priority=1) for kind in (DECRYPT, ENCRYPT)]
    rules = sum(remove_marked(marked, FAMILIES) for marked in marks)
    return rules + clear_table(TABLE, FAMILIES) if rules else 0


class IpsecCustodian:
    """At the start it removes what is left of IPsec, or finds out whether the kernel can do it."""

    def __init__(
        self,
        settings: IpsecSettings,
        agent: AgentConfig,
        kernel: XfrmEdge,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._agent = agent
        self._kernel = kernel
        self._log = log
        lifecycle.append(Hook("prepare IPsec", self._start))

    async def _start(self) -> None:
        if not self._settings.enable_ipsec:
            await self._remove()
            return
        await self._try_kernel(self._read(Path(self._settings.ipsec_key_file)))
        raise UsageError(f"enable-ipsec=true: {NOT_BUILT}; set it to false")

    def _read(self, path: Path) -> IpsecKey:
        try:
            keys = read_keys(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"ipsec-key-file={path}: {text}; besides, {BESIDES}") from None
        if not keys:
            raise UsageError(
                f'ipsec-key-file={path}: no key in it, expected "SPI algorithm key bits"; besides, {BESIDES}'
            )
        return keys[-1]

    async def _try_kernel(self, key: IpsecKey) -> None:
        """Add and remove a state with an output mark in each family. Raises HiveError."""
        on = {Family.IPV4: self._agent.ipv4, Family.IPV6: self._agent.ipv6}
        for family, (source, destination) in TRIAL.items():
            if not on[family]:
                continue
            state = XfrmState(
                source=source,
                destination=destination,
                spi=key.spi,
                mark=XfrmMark(ENCRYPT, KIND),
                output_mark=XfrmMark(ENCRYPT, KIND),
                aead=key.aead,
                auth=key.auth,
                crypt=key.crypt,
            )
            (error,) = await self._kernel.add_states([state])
            await self._kernel.delete_states([state])
            if error is not None and error.errno != errno.EEXIST:
                raise HiveError(
                    f"enable-ipsec=true: this kernel has no ESP for {family.text} with the key's algorithms:"
                    f" {error.reason or error.strerror}; load the modules esp4, esp6 and those of the"
                    " algorithms (CONFIG_INET_ESP, CONFIG_INET6_ESP, CONFIG_CRYPTO_GCM), or set it to false;"
                    f" besides, it is {NOT_BUILT}"
                )

    async def _remove(self) -> None:
        """Remove what an agent with IPsec has left; what remains of it is a warning: nothing uses it."""
        target = XfrmTarget(self._kernel, KeyRing(0, time.monotonic), lambda: IpsecPlan((), ()))
        try:
            if there := await target.observe():
                await target.drop(list(there))
            routes = await self._kernel.remove_routes()
        except (OSError, BatchError) as error:
            if not isinstance(error, OSError) or error.errno not in _NO_XFRM:
                self._log.warning("failed to remove what is left of IPsec", error=str(error))
            return
        if there or routes:
            self._log.info("removed what was left of IPsec", states_and_policies=len(there), routes=routes)


_NO_XFRM: Final = frozenset((errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT))
"""What a kernel without XFRM answers: it has nothing to remove."""


def kernel() -> XfrmEdge:
    """This node's."""
    return KernelIpsec()


def xfrm_marks(settings: IpsecSettings) -> XfrmMarks:
    """Whether the datapath's programs mark packets for the kernel: only while it has states for them."""
    return XfrmMarks(settings.enable_ipsec)


@after(IpsecCustodian)
def keep() -> None:
    """The custodian is part of the agent though no cell depends on it."""


cell = module(
    "ipsec",
    "Encryption between nodes: IPsec",
    config(IpsecSettings),
    provide(IpsecCustodian, xfrm_marks),
    provide_private(kernel),
    invoke(keep),
)
