"""An API server as the source of objects."""

from __future__ import annotations

from cells.kubernetes.source.sink import Sink, SourceStatus

__all__ = ["Sink", "SourceStatus"]
