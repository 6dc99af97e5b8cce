"""Policy objects to rules: decoding, checking, translating.

Pure values; no cell.
Gives: translate, Rule and its parts, PolicyError, PolicyOptions.
"""

from cells.policy.rules.errors import PolicyError
from cells.policy.rules.options import SERVED, PolicyOptions
from cells.policy.rules.peers import CLUSTER, Services, World, means_service
from cells.policy.rules.rule import PROTOCOLS, Direction, PeerRule, PortRange, Rule, Source, Unenforced
from cells.policy.rules.schema import HTTPRule, ServiceReference
from cells.policy.rules.shown import rule_objects
from cells.policy.rules.translate import translate

__all__ = [
    "CLUSTER",
    "PROTOCOLS",
    "SERVED",
    "Direction",
    "HTTPRule",
    "PeerRule",
    "PolicyError",
    "PolicyOptions",
    "PortRange",
    "Rule",
    "ServiceReference",
    "Services",
    "Source",
    "Unenforced",
    "World",
    "means_service",
    "rule_objects",
    "translate",
]
