"""An API server as the source of objects."""

from __future__ import annotations

from cells.kubernetes.source.sink import Sink
from cells.kubernetes.source.status import SourceStatus

__all__ = ["Sink", "SourceStatus"]
