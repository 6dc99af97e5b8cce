"""What holds for one selector on one port, and how two rules that say so become one."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cells.policy.rules.rule import AuthMode, ListenerReference
from cells.policy.rules.schema import DNSRule, HTTPRule, KafkaRule, L7Rules, TLSContext


class PolicyConflictError(ValueError):
    """Two rules cannot both hold: the endpoint keeps the policy it had."""


class RuleOrigin(msgspec.Struct, frozen=True, gc=False, order=True):
    """The rule, and the entry in it, that something comes from."""

    labels: tuple[str, ...]
    source: str = ""
    path: str = ""

    @property
    def text(self) -> str:
        """Which rule it is, in words: its path in which object, or why no object says so."""
        if self.source and self.path:
            return f"{self.path} of {self.source}"
        if any("allow-localhost" in label for label in self.labels):
            return "allow-localhost: the node reaches its own pods, whatever policies say"
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
