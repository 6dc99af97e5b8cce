"""What one write is about, and the time as Kubernetes writes it.

Gives: Call, now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.apiserver.kinds import Kind


def now(after: int = 0) -> str:
    """The time as Kubernetes writes it; some seconds from now."""
    return (datetime.now(UTC) + timedelta(seconds=after)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Call:
    """What one write is about."""

    kind: Kind
    namespace: str
    name: str
    subresource: str = ""
    manager: str = "unknown"
    dry_run: bool = False
    user: Any = None
    strict: str = "Warn"
    warnings: list[str] = field(default_factory=list)
