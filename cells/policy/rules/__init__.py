"""Policy objects to rules: decoding, checking, translating.

Pure values; no cell.
Gives: translate, Rule and its parts, PolicyError, PolicyOptions.
"""

from cells.policy.rules.errors import PolicyError
from cells.policy.rules.options import PolicyOptions
from cells.policy.rules.peers import Services, World
from cells.policy.rules.rule import Direction, PeerRule, PortRange, Rule, Source
from cells.policy.rules.translate import translate

__all__ = [
    "Direction",
    "PeerRule",
    "PolicyError",
    "PolicyOptions",
    "PortRange",
    "Rule",
    "Services",
    "Source",
    "World",
    "translate",
]
