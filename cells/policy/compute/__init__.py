"""Values of policy computation: per-selector policies, map keys and entries; computations in steps.

Rules (``cells.policy.rules``) become filters with a policy per selector (``endpoint_policy``), which with the
selector cache become entries of policy maps (``map_state``, ``policies``). Pure values; no cell.
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


# Long computations as generators, which let the event loop run in between.
#
# They yield None between steps of about a millisecond; other values are results.

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation in steps; its return value is the result."""

SLICE: Final = 0.01
"""Seconds of computation before the event loop runs other tasks."""
TURNS: Final = 4
"""Cycles of the event loop after each slice: enough to accept, read, answer and close a request."""
LONG: Final = 16
"""Slices after which a computation counts as long, e.g. for thousands of policies at start-up."""
STEP: Final = 64
"""Rules, filters or selectors per step."""


def finish(steps: Steps[T]) -> T:
    """Run a computation without pauses and return its result; raises its exceptions."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def in_slices(steps: Iterable[T | None]) -> AsyncIterator[T]:
    """Yield the results of a computation, and let the event loop run after each SLICE.

    A long computation freezes the objects it leaves (``gc.freeze``). Otherwise the garbage collector would
    traverse all rules and entries repeatedly, for up to 0.3 s each; they have no cycles, so reference
    counting frees them. Short computations do not freeze: garbage in undetected cycles would never be
    collected.
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


# Policies per selector and port, and merging those of several rules.


class PolicyConflictError(ValueError):
    """Two rules of an endpoint's policy contradict each other; the endpoint keeps its previous policy."""


class RuleOrigin(msgspec.Struct, frozen=True, gc=False, order=True):
    """The rule, and the entry in it, from which a policy or map entry is derived."""

    labels: tuple[str, ...]
    source: str = ""
    path: str = ""

    @property
    def text(self) -> str:
        """The path and the object of the rule, or the reason if the entry is not from an object."""
        if self.source and self.path:
            return f"{self.path} of {self.source}"
        if any("allow-localhost" in label for label in self.labels):
            return "allow-localhost: the node reaches its own pods under every policy"
        if any("allow-any" in label for label in self.labels):
            return "no policy: none selects the endpoint in this direction"
        return "enableDefaultDeny: its policies do not deny by default"


class SelectorPolicy(msgspec.Struct, frozen=True, gc=False):
    """The policy for peers of one selector on one port; the default allows without L7 rules.

    Source: Cilium's ``PerSelectorPolicy``.
    """

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
        """Whether the traffic is redirected to a proxy."""
        return bool(self.parser) and not self.deny


def merged_parser(one: str, other: str) -> str:
    """Return the L7 parser that serves both. Raises PolicyConflictError if none does."""
    if one == other or not other:
        return one
    if not one:
        return other
    for promoted, to in ((one, other), (other, one)):
        if promoted == "tls" and to != "dns":
            return to
    raise PolicyConflictError(f"cannot merge conflicting L7 parsers ({one}/{other})")


def merged(held: SelectorPolicy, new: SelectorPolicy) -> SelectorPolicy:
    """Merge two policies for a selector: a deny wins, L7 rules are united. Raises PolicyConflictError.

    The result has the origins of ``held`` only: merging those of many rules here would take quadratic time.
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
    """Return the listener with the lower priority number; priority 0 means none and comes last."""
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
    """Return the rules with an additional rule that matches every request."""
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


# Keys and entries of policy maps, before encoding. Source: the layout of ``cilium_policy_*``.

AUTH_DISABLED, AUTH_SPIRE, AUTH_ALWAYS_FAIL = 0, 1, 2
AUTH_TYPES = {"disabled": AUTH_DISABLED, "required": AUTH_SPIRE, "test-always-fail": AUTH_ALWAYS_FAIL}
"""Authentication types of map entries, by the mode in a rule."""

FULL_PORT = 16


class PortKey(NamedTuple):
    """Protocol and port prefix of a policy map's key.

    ``bits`` is the length of the port's prefix; 0 matches every port of the protocol. Protocol 0 matches
    every protocol and port.
    """

    protocol: int = 0
    port: int = 0
    bits: int = 0

    def covers(self, other: PortKey) -> bool:
        """Whether the key matches every packet that the other matches; equal keys cover each other."""
        if self.protocol == 0:
            return True
        return (
            self.protocol == other.protocol
            and self.bits <= other.bits
            and (self.port ^ other.port) >> (FULL_PORT - self.bits) == 0
        )

    @property
    def specificity(self) -> int:
        """The length of the key's prefix after the identity: 0, 8 with a protocol, plus the port's bits."""
        return 8 + self.bits if self.protocol else 0


EVERYTHING = PortKey()

FilterPeer = tuple[PortRange, PeerSelector]
"""One selector of a filter: the filter's port range and the selector."""


class Key(NamedTuple):
    """A key of one direction: an identity (0: any) and ports."""

    identity: int
    ports: PortKey


class Redirect(NamedTuple):
    """A redirect to a proxy; the lowest priority number wins, then the lowest proxy port.

    The HTTP proxy selects its rules by the proxy port alone, so each distinct ``filter_peers`` (the filters
    and selectors with these rules) gets its own. ``port`` is 0 until it is allocated. Other proxies have no
    ``filter_peers``.
    """

    priority: int
    port: int
    name: str
    filter_peers: frozenset[FilterPeer] | None = None

    @classmethod
    def merged(cls, redirects: Sequence[Redirect]) -> Redirect | None:
        """Merge redirects of one key; those of the HTTP proxy enforce the rules of all their selectors."""
        chosen = min(redirects, default=None, key=lambda one: one[:3])
        if chosen is None or chosen.filter_peers is None or len(redirects) == 1:
            return chosen
        filter_peers = (
            one.filter_peers for one in redirects if one.name == chosen.name and one.filter_peers is not None
        )
        return chosen._replace(filter_peers=frozenset[FilterPeer]().union(*filter_peers))


@lru_cache(maxsize=8192)
def interned(entry: Entry) -> Entry:
    """Return one shared instance of equal entries: comparing policies is then fast, and they share memory."""
    return entry


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A policy map's entry: verdict, redirect and authentication. ``auth`` is None if no rule sets it."""

    deny: bool = False
    redirect: Redirect | None = None
    auth: int | None = None
    inherited_auth: int = AUTH_DISABLED
    origins: frozenset[RuleOrigin] = frozenset()

    @property
    def auth_type(self) -> int:
        """The required authentication: explicit, else inherited."""
        return self.inherited_auth if self.auth is None else self.auth

    def same_effect(self, other: Entry) -> bool:
        """Whether both entries have the same effect on packets, whatever their origins."""
        return (self.deny, self.redirect, self.auth) == (other.deny, other.redirect, other.auth)

    @classmethod
    def merged(cls, entries: Sequence[Entry]) -> Entry:
        """Merge entries of one key.

        A deny wins; else a redirect and explicit authentication win over none.
        """
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
        """Return the entry with authentication inherited from a broader entry."""
        return self if auth == self.inherited_auth else msgspec.structs.replace(self, inherited_auth=auth)
