"""A folder of manifests as the source of objects: the embedded default, without any API server."""

from __future__ import annotations

from cells.kubernetes.manifests.file import ManifestFile
from cells.kubernetes.manifests.source import ManifestsSource, manifest_files
from cells.kubernetes.manifests.values import wrong_value

__all__ = ["ManifestFile", "ManifestsSource", "manifest_files", "wrong_value"]
