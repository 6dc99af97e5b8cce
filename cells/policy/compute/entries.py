"""Keys and entries of a policy map, as the engine computes them.

Key: (direction,) identity or 0, protocol or 0, port prefix. Source: the layout of ``cilium_policy_*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from cells.policy.compute.selector_policy import RuleOrigin
from cells.policy.labels import PeerSelector
from cells.policy.rules.rule import PortRange

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

Said = tuple[PortRange, PeerSelector]
"""A filter of a direction, by its ports, and one of its selectors."""


class Key(NamedTuple):
    """A key of one direction: an identity, 0 for any, and ports."""

    identity: int
    ports: PortKey


class Redirect(NamedTuple):
    """The proxy that takes the traffic; the lowest priority number wins, then the lowest port.

    A proxy that is told by its port alone what holds has one for each ``said``: what rules say, on which
    ports and to which selectors. It has no ``port`` before that is known. Others leave ``said`` None.
    """

    priority: int
    port: int
    name: str
    said: frozenset[Said] | None = None

    @classmethod
    def merged(cls, redirects: Sequence[Redirect]) -> Redirect | None:
        """Of several for one key: to peers of two selectors rules say both."""
        chosen = min(redirects, default=None, key=lambda one: one[:3])
        if chosen is None or chosen.said is None or len(redirects) == 1:
            return chosen
        said = (one.said for one in redirects if one.name == chosen.name and one.said is not None)
        return chosen._replace(said=frozenset[Said]().union(*said))


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
