"""Rules and identities to map entries.

Pure values and caches; no cell.
"""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import msgspec
from anyio.lowlevel import checkpoint

from cells.policy.rules import AuthMode, ListenerReference, PortRange
from cells.policy.rules.schema import DNSRule, HTTPRule, KafkaRule, L7Rules, TLSContext
from cells.policy.selectors import PeerSelector

__all__ = [
    "Entry",
    "FilterPeer",
    "Key",
    "PolicyConflictError",
    "PortKey",
    "Redirect",
    "SelectorPolicy",
    "in_slices",
]


# Long computations as generators that yield now and then, so that an event loop may run in between.
#
# They yield None between steps of about a millisecond, and other things as results.

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that has its result at the end."""

SLICE: Final = 0.01
"""Seconds of computation before others have the loop."""
TURNS: Final = 4
"""Turns that the loop gets after each slice: a request is accepted, read, answered and closed in so many."""
LONG: Final = 16
"""Slices after which a computation is a long one, as of thousands of policies that come at once."""
STEP: Final = 64
"""Rules, filters or selectors that make a step."""


def finish(steps: Steps[T]) -> T:
    """The result of a computation, without a pause; raises what it raises."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def in_slices(steps: Iterable[T | None]) -> AsyncIterator[T]:
    """The results of a computation, each at once, with turns of the event loop after each SLICE.

    What a long computation leaves is taken out of the sight of the garbage collector, which would look
    through all of it again and again, for up to 0.3 s at a time: rules and entries have no cycles, and are
    freed without it. Short ones do not: garbage in cycles that is not found yet would stay for good.
    """
    turn = time.monotonic() + SLICE
    slices = 0
    for result in steps:
        if result is not None:
            yield result
        if time.monotonic() >= turn:
            slices += 1
            if slices >= LONG:
                gc.collect(0)
                gc.freeze()
            for _ in range(TURNS):
                await checkpoint()
            turn = time.monotonic() + SLICE


# What holds for one selector on one port, and how two rules that say so become one.


class PolicyConflictError(ValueError):
    """Two rules cannot both hold: the endpoint keeps the policy it had."""


class RuleOrigin(msgspec.Struct, frozen=True, gc=False, order=True):
    """The rule, and the entry in it, that something comes from."""

    labels: tuple[str, ...]
    source: str = ""
    path: str = ""

    @property
    def text(self) -> str:
        """Which rule it is, in words: its path in which object, or why no object has it."""
        if self.source and self.path:
            return f"{self.path} of {self.source}"
        if any("allow-localhost" in label for label in self.labels):
            return "allow-localhost: the node reaches its own pods under every policy"
        if any("allow-any" in label for label in self.labels):
            return "no policy: none selects the endpoint in this direction"
        return "enableDefaultDeny: its policies do not deny by default"


class SelectorPolicy(msgspec.Struct, frozen=True, gc=False):
    """What holds for the peers of one selector on one port; nothing but allowed by default."""

    deny: bool = False
    parser: str = ""
    rules: L7Rules | None = None
    listener: ListenerReference | None = None
    server_names: tuple[str, ...] = ()
    terminating_tls: TLSContext | None = None
    originating_tls: TLSContext | None = None
    auth: AuthMode | None = None
    origins: tuple[RuleOrigin, ...] = ()

    @property
    def redirects(self) -> bool:
        """Whether a proxy takes the traffic."""
        return bool(self.parser) and not self.deny


def merged_parser(one: str, other: str) -> str:
    """The parser that serves both. Raises PolicyConflictError when none does."""
    if one == other or not other:
        return one
    if not one:
        return other
    for promoted, to in ((one, other), (other, one)):
        if promoted == "tls" and to != "dns":
            return to
    raise PolicyConflictError(f"cannot merge conflicting L7 parsers ({one}/{other})")


def merged(held: SelectorPolicy, new: SelectorPolicy) -> SelectorPolicy:
    """Both at once: a deny stands alone, L7 rules add up. Raises PolicyConflictError.

    The result has the origins of ``held``: collecting those of many rules here would take quadratic time.
    """
    if held.deny or new.deny:
        return held if held.deny else SelectorPolicy(deny=True, origins=held.origins)
    if held.auth is not None and new.auth is not None and held.auth != new.auth:
        raise PolicyConflictError(f"cannot merge conflicting authentication types ({held.auth}/{new.auth})")
    for one, other in (
        (held.terminating_tls, new.terminating_tls),
        (held.originating_tls, new.originating_tls),
    ):
        if one is not None and other is not None and one != other:
            raise PolicyConflictError("cannot merge conflicting TLS contexts")
    return SelectorPolicy(
        parser=merged_parser(held.parser, new.parser),
        rules=_merged_rules(held.rules, new.rules),
        listener=_merged_listener(held.listener, new.listener),
        server_names=tuple(dict.fromkeys((*held.server_names, *new.server_names))),
        terminating_tls=held.terminating_tls or new.terminating_tls,
        originating_tls=held.originating_tls or new.originating_tls,
        auth=held.auth or new.auth,
        origins=held.origins,
    )


def _merged_listener(
    held: ListenerReference | None, new: ListenerReference | None
) -> ListenerReference | None:
    """The one with the smaller priority number; one without priority comes after all that have one."""
    if held is None or new is None:
        return held or new
    if held.name == new.name:
        return held if held.priority and (held.priority <= new.priority or not new.priority) else new
    if held.priority == new.priority:
        raise PolicyConflictError(
            f"cannot merge conflicting CiliumEnvoyConfig Listeners ({held.name}/{new.name}) "
            f"with the same priority ({held.priority})"
        )
    return min(held, new, key=lambda one: one.priority or 1 << 16)


def _merged_rules(held: L7Rules | None, new: L7Rules | None) -> L7Rules | None:
    if held is None and new is None:
        return None
    if held is None or new is None:
        return _with_wildcard(held or new)
    if held.parser != new.parser:
        raise PolicyConflictError(f"cannot merge conflicting L7 parsers ({held.parser}/{new.parser})")
    return msgspec.structs.replace(
        held,
        http=_union(held.http, new.http),
        kafka=_union(held.kafka, new.kafka),
        dns=_union(held.dns, new.dns),
        l7=_union(held.l7, new.l7),
    )


_Rule = TypeVar("_Rule")


def _union(held: tuple[_Rule, ...] | None, new: tuple[_Rule, ...] | None) -> tuple[_Rule, ...] | None:
    if held is None or new is None:
        return held or new
    return (*held, *(one for one in new if one not in held))


def _with_wildcard(rules: L7Rules | None) -> L7Rules | None:
    """The rules with one more that every request meets."""
    if rules is None:
        return None
    every = L7Rules(
        http=(HTTPRule(),) if rules.http else None,
        kafka=(KafkaRule(),) if rules.kafka else None,
        dns=(DNSRule(match_pattern="*"),) if rules.dns else None,
        l7proto=rules.l7proto,
        l7=({},) if rules.l7proto else None,
    )
    return _merged_rules(rules, every)


# Keys and entries of a policy map, as the engine computes them.
#
# Key: (direction,) identity or 0, protocol or 0, port prefix. Source: the layout of ``cilium_policy_*``.

AUTH_DISABLED, AUTH_SPIRE, AUTH_ALWAYS_FAIL = 0, 1, 2
AUTH_TYPES = {"disabled": AUTH_DISABLED, "required": AUTH_SPIRE, "test-always-fail": AUTH_ALWAYS_FAIL}
"""Numbers of authentication types in map entries, by mode in a rule."""

FULL_PORT = 16


class PortKey(NamedTuple):
    """Protocol and port prefix: the part of a key that a packet's headers decide.

    ``bits`` counts the port's leading bits that must be equal; 0 is every port of the protocol. Protocol 0
    is every protocol, and then every port.
    """

    protocol: int = 0
    port: int = 0
    bits: int = 0

    def covers(self, other: PortKey) -> bool:
        """Whether every packet of the other is one of this, too; equal keys cover each other."""
        if self.protocol == 0:
            return True
        return (
            self.protocol == other.protocol
            and self.bits <= other.bits
            and (self.port ^ other.port) >> (FULL_PORT - self.bits) == 0
        )

    @property
    def specificity(self) -> int:
        """How much of a packet must be equal, in bits beyond the identity: 0, 8, or 8 and the port's."""
        return 8 + self.bits if self.protocol else 0


EVERYTHING = PortKey()

FilterPeer = tuple[PortRange, PeerSelector]
"""A filter of a direction, by its ports, and one of its selectors."""


class Key(NamedTuple):
    """A key of one direction: an identity, 0 for any, and ports."""

    identity: int
    ports: PortKey


class Redirect(NamedTuple):
    """The proxy that takes the traffic; the lowest priority number wins, then the lowest port.

    A proxy that knows by its port alone what holds has one for each ``filter_peers``: what rules say, on what
    ports and to which selectors. It has no ``port`` before that is known. Others leave ``filter_peers`` None.
    """

    priority: int
    port: int
    name: str
    filter_peers: frozenset[FilterPeer] | None = None

    @classmethod
    def merged(cls, redirects: Sequence[Redirect]) -> Redirect | None:
        """Of several for one key: to peers of two selectors rules say both."""
        chosen = min(redirects, default=None, key=lambda one: one[:3])
        if chosen is None or chosen.filter_peers is None or len(redirects) == 1:
            return chosen
        filter_peers = (
            one.filter_peers for one in redirects if one.name == chosen.name and one.filter_peers is not None
        )
        return chosen._replace(filter_peers=frozenset[FilterPeer]().union(*filter_peers))


@lru_cache(maxsize=8192)
def same(entry: Entry) -> Entry:
    """The one object of an entry: policies that say the same are quickly seen to do so, and share memory."""
    return entry


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What happens to packets of a key. ``auth`` is None where no rule speaks of it."""

    deny: bool = False
    redirect: Redirect | None = None
    auth: int | None = None
    inherited_auth: int = AUTH_DISABLED
    origins: frozenset[RuleOrigin] = frozenset()

    @property
    def auth_type(self) -> int:
        """The authentication that is asked for."""
        return self.inherited_auth if self.auth is None else self.auth

    def same_effect(self, other: Entry) -> bool:
        """Whether packets fare the same, whatever the entries come from."""
        return (self.deny, self.redirect, self.auth) == (other.deny, other.redirect, other.auth)

    @classmethod
    def merged(cls, entries: Sequence[Entry]) -> Entry:
        """All for one key: deny is sticky, a redirect beats none, explicit authentication beats none."""
        if len(entries) == 1:
            return entries[0]
        denies = [one for one in entries if one.deny]
        origins = frozenset[RuleOrigin]().union(*(one.origins for one in denies or entries))
        if denies:
            return cls(deny=True, origins=origins)
        return cls(
            redirect=Redirect.merged([one.redirect for one in entries if one.redirect is not None]),
            auth=max((one.auth for one in entries if one.auth is not None), default=None),
            inherited_auth=max(one.inherited_auth for one in entries),
            origins=origins,
        )

    def inheriting(self, auth: int) -> Entry:
        """With the authentication of a broader entry."""
        return self if auth == self.inherited_auth else msgspec.structs.replace(self, inherited_auth=auth)
