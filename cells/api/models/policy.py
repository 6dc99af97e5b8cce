"""The wire types of policies.

Needs: Model.   Gives: Policy, SelectorIdentityMapping, SelectorLabel.
"""

from __future__ import annotations

from cells.api.models.v1 import Model


class Policy(Model, frozen=True, omit_defaults=False):
    """The policies in force, as JSON in a text."""

    policy: str = "[]"
    revision: int = 1


class SelectorLabel(Model, frozen=True, omit_defaults=False):
    """One label of a rule."""

    key: str
    value: str
    source: str


class SelectorIdentityMapping(Model, frozen=True, omit_defaults=False):
    """A selector in use, whom it selects, how many use it, and the labels of a rule that has it."""

    selector: str
    identities: list[int]
    users: int
    labels: list[SelectorLabel]
