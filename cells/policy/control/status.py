"""What became of each policy object: in force, or refused and why.

Gives: PolicyObject, policy_objects.
"""

from __future__ import annotations

import msgspec

from lifecycle import Table


class PolicyObject(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``policies``."""

    kind: str
    namespace: str
    name: str
    valid: bool
    """Whether it is in force as it is written."""
    refused: bool = False
    """Whether its latest version is refused, and the previous one is in force, if there was one."""
    message: str
    """``Policy validation succeeded``, or why the object is refused and its previous version is in force, or
    what of it is in force otherwise than it is written."""
    path: str = ""
    """The field that is wrong."""
    unenforced: str = ""
    """Why connections that its rules.http select are dropped, or may go by rules of before; else empty."""
    revision: int = 0
    """Of the rules, when the object was last taken in."""

    @property
    def text(self) -> str:
        """The message, and where in the object."""
        return f"{self.message} (at {self.path})" if self.path else self.message


def policy_objects() -> Table[PolicyObject]:
    """The ``policies`` table, by kind, namespace and name."""
    return Table("policies", key=lambda one: (one.kind, one.namespace, one.name))
